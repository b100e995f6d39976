"""A conversation: questions and images turn by turn on one cache."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from conduit_kv.engine.report import Report
from conduit_kv.engine.runner import Reply, Runner, State
from conduit_kv.engine.sampling import Sampling, TextStream
from conduit_kv.engine.saved import load_state, save_state
from conduit_kv.errors import InputError
from conduit_kv.images import ImageLike
from conduit_kv.plan import Plan
from conduit_kv.reuse.store import Store
from conduit_kv.videos import VideoLike, read_video

_MARK = "\u241e\u241e"
"""Stands for an answer when a template is asked what follows one."""


@dataclass
class _Turn:
    """A conversation at the end of a turn, to come back to.

    Attributes
    ----------
    seen : int
        Tokens seen by then. Where a plan only adds to the cache, going back takes them off again.
    state : State or None
        A copy of the state, where a plan lets go of something; and that of a fork.
    """

    messages: list[dict[str, Any]]
    pending: list[int]
    seen: int
    logits: Any
    state: State | None = None


def _copy(state: State | None) -> State | None:
    if state is None:
        return None
    return State(state.cache.fork(), state.logits, list(state.ids), dict(state.seconds))


class Session:
    """A conversation under one plan.

    Each turn runs only its own tokens, new images included, on what the cache still holds; the
    budget is then solved anew over all tokens seen.

    Parameters
    ----------
    vlm : Runner
    plan : Plan
    prefill_chunk : int or None
    store : Store or None
        Where a reuse or retrieve stage keeps images; the model's own, in memory, by default.
        An error under a plan that has neither.
    """

    def __init__(
        self,
        vlm: Runner,
        plan: Plan,
        prefill_chunk: int | None = None,
        store: Store | None = None,
    ) -> None:
        plan.check_store(store)
        self.vlm = vlm
        self.plan = plan
        self.store = store
        self.state: State | None = None
        self.messages: list[dict[str, Any]] = []
        self._chunk = prefill_chunk
        self._pending: list[int] = []
        self._before: _Turn | None = None

    @property
    def report(self) -> Report:
        """What was really done so far.

        Raises
        ------
        InputError
            Before the first question.
        """
        if self.state is None:
            raise InputError("nothing has been asked yet")
        return self.state.report

    def ask(
        self,
        question: str,
        images: Sequence[ImageLike] = (),
        *,
        videos: Sequence[VideoLike] = (),
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Ask the next question, with new images if any; see :meth:`VLM.ask`."""
        stream = self.stream(
            question,
            images,
            videos=videos,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=stop,
        )
        while True:
            try:
                next(stream)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def stream(
        self,
        question: str,
        images: Sequence[ImageLike] = (),
        *,
        videos: Sequence[VideoLike] = (),
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generator[str, None, Reply]:
        """Like :meth:`ask`, but gives the answer's text piece by piece.

        The generator's return value is the :class:`Reply`.
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}: ask for at least one")
        if not question.strip() and not images and not videos:
            raise InputError("the question is empty")
        films = [read_video(video) for video in videos]
        content: list[dict[str, str]] = [{"type": "image"} for _ in images]
        if self.vlm.takes_videos:
            content += [{"type": "video"} for _ in films]
        else:  # frames are images, numbered on after those before them
            frames = [frame for film in films for frame in film.frames]
            for number in range(len(images) + 1, len(images) + len(frames) + 1):
                content += [{"type": "text", "text": f"Image {number}:"}, {"type": "image"}]
            images, films = [*images, *frames], []
        message = {"role": "user", "content": [*content, {"type": "text", "text": question}]}
        inputs = self.vlm.process(
            self._turn_text(message), images, videos=films, first=self.state is None
        )
        if self._pending:
            inputs = self._with_pending(inputs)
        seen = self.state.ids if self.state else []
        tokens_in_all = [*seen, *inputs["input_ids"][0].tolist()]
        self.vlm.check_length(self.vlm.visible(tokens_in_all, self.plan), max_new_tokens)
        before = self._now()
        if self.state is None:
            state = self.vlm.prefill(inputs, self.plan, chunk=self._chunk, store=self.store)
        else:
            state = self.vlm.extend(self.state, inputs, chunk=self._chunk)
        self.state, self._before = state, before
        self._pending = []
        chooser = (sampling or Sampling()).chooser()
        text, ends = TextStream(self.vlm.tokenizer), self.vlm.end_tokens()
        tokens: list[int] = []
        finish, shown, started = "length", "", time.perf_counter()
        try:
            while len(tokens) < max_new_tokens:
                ids = torch.tensor([state.ids], device=state.logits.device)
                token = chooser(ids, state.logits)
                if token in ends:
                    finish = "stop"
                    break
                tokens.append(token)
                self._pending = [token]
                piece = text.push(token)
                cut = _first_stop(text.text, stop)
                if cut is not None:
                    finish, shown = "stop", text.text[:cut]
                    break
                held_back = _longest_overlap(text.text, stop)
                visible = text.text[: len(text.text) - held_back] if piece else shown
                if len(visible) > len(shown):
                    yield visible[len(shown) :]
                    shown = visible
                if len(tokens) < max_new_tokens:
                    self.vlm.step([state], [token])
                    self._pending = []
        finally:
            answer = shown if _first_stop(text.text, stop) is not None else text.text
            self.messages += [
                message,
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ]
            if tokens:
                spent = time.perf_counter() - started
                state.seconds["per_token"] = spent / len(tokens)
        if len(answer) > len(shown):
            yield answer[len(shown) :]
        return Reply(answer, tuple(tokens), finish, state.report)

    # -- other ways to go on -----------------------------------------------------------------

    def fork(self) -> Session:
        """A conversation that goes its own way from here; nothing that is written is shared."""
        other = Session(self.vlm, self.plan, self._chunk, self.store)
        other.state = _copy(self.state)
        other.messages, other._pending = list(self.messages), list(self._pending)
        if self._before is not None:
            other._before = replace(self._before, state=_copy(self._before.state))
        return other

    def undo(self) -> None:
        """Take the last turn back, question and answer.

        What the plan let go for that turn is there again. One turn can be undone: the next undo
        needs a turn between.

        Raises
        ------
        InputError
            If there is no turn to take back.
        """
        if self._before is None:
            raise InputError("there is no turn to take back: one turn can be undone, once")
        before, self._before = self._before, None
        self.messages, self._pending = before.messages, before.pending
        if before.state is not None or not before.seen or self.state is None:
            self.state = before.state
            return
        self.state.cache.go_back(before.seen)
        self.state.logits = before.logits
        del self.state.ids[before.seen :]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes allocated: by the cache, and by the copy that :meth:`undo` goes back to."""
        found = {"cache": 0, "undo": 0}
        copy = None if self._before is None else self._before.state
        for name, state in (("cache", self.state), ("undo", copy)):
            if state is not None:
                found[name] = sum(state.cache.bytes_allocated().values())
        return found

    def save(self, path: str | Path) -> None:
        """Write the conversation to a file, to go on with it in another process.

        The file holds the cache as the plan left it, and so can reveal what was shown and said; it
        can be read by its owner alone.

        Raises
        ------
        InputError
            If nothing has been asked yet, or the file cannot be written.
        """
        if self.state is None:
            raise InputError("nothing has been asked yet: there is nothing to save")
        save_state(path, self)

    @staticmethod
    def load(vlm: Runner, path: str | Path, *, store: Store | None = None) -> Session:
        """A conversation that :meth:`save` has written.

        Raises
        ------
        InputError
            If the file cannot be read, is damaged, of another version, or of another model.
        """
        return load_state(vlm, path, store)

    def _now(self) -> _Turn:
        state = self.state
        kept = None if state is None or state.cache.only_adds else _copy(state)
        seen = 0 if state is None else len(state.ids)
        logits = None if state is None else state.logits
        return _Turn(list(self.messages), list(self._pending), seen, logits, kept)

    def _turn_text(self, message: dict[str, Any]) -> str:
        """The text that this turn adds to what the cache has seen."""
        if self.state is None:
            return self.vlm.render([message])
        marked = {"role": "assistant", "content": [{"type": "text", "text": _MARK}]}
        # What follows an answer does not depend on the answer, whose tokens are in the cache.
        return self.vlm.render([*self.messages[:-1], marked, message]).rpartition(_MARK)[2]

    def _with_pending(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Put tokens that were answered, but not run yet, before the turn's own."""
        ids = inputs["input_ids"]
        first = torch.tensor([self._pending], dtype=ids.dtype, device=ids.device)
        inputs = {**inputs, "input_ids": torch.cat([first, ids], dim=1)}
        for name, filler in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            if name in inputs:
                pad = torch.full_like(first, filler).to(inputs[name].dtype)
                inputs[name] = torch.cat([pad, inputs[name]], dim=1)
        return inputs


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    places = [text.find(word) for word in stop if word and word in text]
    return min(places) if places else None


def _longest_overlap(text: str, stop: Sequence[str]) -> int:
    """How much of the text's end may be the beginning of a stop string."""
    longest = 0
    for word in stop:
        for size in range(min(len(word) - 1, len(text)), 0, -1):
            if text.endswith(word[:size]):
                longest = max(longest, size)
                break
    return longest
