"""A conversation: questions and images turn by turn on one cache."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

import torch

from conduit_kv.engine.report import Report
from conduit_kv.engine.runner import Reply, Runner, State
from conduit_kv.engine.sampling import Sampling, TextStream
from conduit_kv.errors import InputError
from conduit_kv.images import ImageLike
from conduit_kv.plan import Plan

_MARK = "\u241e\u241e"
"""Stands for an answer when a template is asked what follows one."""


class Session:
    """A conversation under one plan.

    Each turn runs only its own tokens, new images included, on what the cache still holds; the
    budget is then solved anew over all tokens seen.

    Parameters
    ----------
    vlm : Runner
    plan : Plan
    prefill_chunk : int or None
    """

    def __init__(self, vlm: Runner, plan: Plan, prefill_chunk: int | None = None) -> None:
        self.vlm = vlm
        self.plan = plan
        self.state: State | None = None
        self.messages: list[dict[str, Any]] = []
        self._chunk = prefill_chunk
        self._pending: list[int] = []
        self._per_token: float | None = None

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
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Ask the next question, with new images if any; see :meth:`VLM.ask`."""
        stream = self.stream(
            question, images, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop
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
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
    ) -> Generator[str, None, Reply]:
        """Like :meth:`ask`, but gives the answer's text piece by piece.

        The generator's return value is the :class:`Reply`.
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}: ask for at least one")
        if not question.strip() and not images:
            raise InputError("the question is empty")
        message = {
            "role": "user",
            "content": [
                *({"type": "image"} for _ in images),
                {"type": "text", "text": question},
            ],
        }
        inputs = self.vlm.process(self._turn_text(message), images, first=self.state is None)
        if self._pending:
            inputs = self._with_pending(inputs)
        seen = len(self.state.ids) if self.state else 0
        self.vlm.check_length(seen + inputs["input_ids"].shape[1], max_new_tokens)
        if self.state is None:
            state = self.vlm.prefill(inputs, self.plan, chunk=self._chunk)
        else:
            state = self.vlm.extend(self.state, inputs, chunk=self._chunk)
        self.state = state
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
