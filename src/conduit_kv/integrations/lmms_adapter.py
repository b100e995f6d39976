"""How lmms-eval's requests are answered; lmms-eval itself is not needed here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from conduit_kv.errors import InputError
from conduit_kv.extras import need
from conduit_kv.plan import Plan

if TYPE_CHECKING:
    from conduit_kv.engine.runner import State
    from conduit_kv.engine.vlm import VLM

__all__ = ["Adapter", "Answer", "chat_of"]

_MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Answer:
    """An answer, with what it was answered from.

    Attributes
    ----------
    text : str
    tokens : int
        Of the answer.
    prompt_tokens : int
    kept : float
        Tokens held when the answer begins, mean over layers.
    kv_bytes, full_bytes : int
    first_token_s : float
    """

    text: str
    tokens: int
    prompt_tokens: int
    kept: float
    kv_bytes: int
    full_bytes: int
    first_token_s: float


def chat_of(
    messages: Sequence[Mapping[str, Any]], frames: int = 32
) -> tuple[list[dict[str, Any]], list[Any]]:
    """lmms-eval's messages as the processor's, and their images in order.

    Parameters
    ----------
    messages : sequence of mapping
        ``{"role": ..., "content": [{"type": "image", "url": ...} | {"type": "text", ...}]}``.
    frames : int
        A video is shown as so many images, evenly spaced.

    Raises
    ------
    InputError
        If there is content that is neither text, image nor video.
    """
    chat: list[dict[str, Any]] = []
    images: list[Any] = []
    for message in messages:
        parts: list[dict[str, str]] = []
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for part in content:
            kind = part["type"]
            if kind == "text":
                parts.append({"type": "text", "text": part["text"]})
            elif kind == "image":
                parts.append({"type": "image"})
                images.append(part["url"])
            elif kind == "video":
                shown = _frames(part["url"], frames)
                parts += [{"type": "image"}] * len(shown)
                images += shown
            else:
                raise InputError(f"{kind} cannot be shown to a vision-language model")
        chat.append({"role": message["role"], "content": parts})
    return chat, images


def _frames(video: Any, count: int) -> list[Any]:
    """Evenly spaced frames of a video file, or of a list of them."""
    if isinstance(video, list | tuple):
        frames = list(video)
    else:
        av = need("av", "lmms", "a video file")
        with av.open(str(video)) as container:
            frames = [frame.to_image() for frame in container.decode(video=0)]
    if not frames:
        raise InputError(f"{video} has no frames")
    step = max(1.0, len(frames) / count)
    return [frames[int(step * number)] for number in range(min(count, len(frames)))]


class Adapter:
    """Answers requests in batches, each under one plan.

    Parameters
    ----------
    vlm : VLM
    plan : Plan
    batch_size : int
        Requests decoded together. Each is prefilled by itself, so that nothing is padded and an
        answer does not depend on its neighbours.
    frames : int
        Of a video.
    log : Path, optional
        One line per answer: task, document, tokens, bytes and seconds.
    """

    def __init__(
        self,
        vlm: VLM,
        plan: Plan,
        batch_size: int = 1,
        frames: int = 32,
        log: Path | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}: take at least 1")
        self.vlm = vlm
        self.plan = plan
        self.size = batch_size
        self.frames = frames
        self.log = log

    def answer(self, requests: Sequence[Any], documents: Mapping[str, Any]) -> list[Answer]:
        """Answer requests, in their order.

        Parameters
        ----------
        requests : sequence of Instance
            Their ``args`` are context, messages, settings, document, task and split.
        documents : mapping
            Task to split to documents.

        Raises
        ------
        InputError
            If a request asks for sampling or beams.
        """
        found: list[Answer] = []
        for start in range(0, len(requests), self.size):
            found += self._batch(requests[start : start + self.size], documents)
        return found

    def _batch(self, requests: Sequence[Any], documents: Mapping[str, Any]) -> list[Answer]:
        states, limits, stops = [], [], []
        for request in requests:
            _, messages_of, settings, document, task, split = request.args
            limit, stop = _settings(settings)
            chat, images = chat_of(messages_of(documents[task][split][document]), self.frames)
            inputs = self.vlm.process(self.vlm.render(chat), [_picture(each) for each in images])
            self.vlm.check_length(inputs["input_ids"].shape[1], limit)
            states.append(self.vlm.prefill(inputs, self.plan))
            limits.append(limit)
            stops.append(stop)
        reports = [state.report for state in states]
        answers = []
        tokens = self._decode(states, limits, stops)
        for request, stop, report, mine in zip(requests, stops, reports, tokens, strict=True):
            (sequence,) = report.sequences
            answer = Answer(
                text=_until(self._text(mine), stop).strip(),
                tokens=len(mine),
                prompt_tokens=sequence.tokens,
                kept=sequence.kept,
                kv_bytes=report.kv_bytes,
                full_bytes=report.full_bytes,
                first_token_s=report.seconds["first_token"],
            )
            answers.append(answer)
            self._write(request, answer)
        return answers

    def _decode(
        self, states: Sequence[State], limits: Sequence[int], stops: Sequence[Sequence[str]]
    ) -> list[list[int]]:
        """Greedy answers as one batch; each ends by itself."""
        ends = self.vlm.end_tokens()
        tokens: list[list[int]] = [[] for _ in states]
        going = list(range(len(states)))
        while going:
            chosen = {row: int(states[row].logits.argmax(-1)) for row in going}
            going = [row for row in going if chosen[row] not in ends]
            for row in going:
                tokens[row].append(chosen[row])
            going = [
                row
                for row in going
                if len(tokens[row]) < limits[row]
                and not any(stop in self._text(tokens[row]) for stop in stops[row])
            ]
            if going:
                self.vlm.step([states[row] for row in going], [chosen[row] for row in going])
        return tokens

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.vlm.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _write(self, request: Any, answer: Answer) -> None:
        if self.log is None:
            return
        _, _, _, document, task, _ = request.args
        line = {"task": task, "document": document, "plan": str(self.plan), **vars(answer)}
        with self.log.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")


def _settings(settings: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Most new tokens, and what ends an answer."""
    beams, temperature = settings.get("num_beams") or 1, settings.get("temperature") or 0
    if beams != 1 or temperature > 0 or settings.get("do_sample"):
        raise InputError(
            "answers are greedy here: set temperature 0, num_beams 1 and do_sample false "
            "(--gen_kwargs temperature=0,num_beams=1,do_sample=False)"
        )
    until = settings.get("until") or []
    stops = [until] if isinstance(until, str) else [stop for stop in until if stop]
    return int(settings.get("max_new_tokens") or _MAX_NEW_TOKENS), stops


def _until(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        text = text.partition(stop)[0]
    return text


def _picture(image: Any) -> Any:
    return image.convert("RGB") if isinstance(image, Image.Image) else image
