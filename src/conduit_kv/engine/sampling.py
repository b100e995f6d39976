"""Choosing the next token, and turning tokens into text as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from conduit_kv.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Parameters
    ----------
    temperature : float
        0 is greedy.
    top_p, top_k : float, int
        1.0 and 0 leave them out.
    repetition_penalty : float
        1.0 leaves it out.
    seed : int or None
        Makes sampling repeatable.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InputError(f"temperature {self.temperature:g} is negative: 0 is greedy")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p:g} is not in (0, 1]")

    def chooser(self) -> Chooser:
        """A fresh chooser for one answer."""
        return Chooser(self)


class Chooser:
    """Chooses tokens of one answer."""

    def __init__(self, sampling: Sampling) -> None:
        self._greedy = sampling.temperature == 0
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if not self._greedy:
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, ids: Tensor, logits: Tensor) -> int:
        """The next token after ``ids`` ``[1, T]`` from ``logits`` ``[1, V]``."""
        scores = self._processors(ids, logits.float()) if self._processors else logits
        if self._greedy:
            return int(scores.argmax(-1))
        weights = scores.softmax(-1).cpu()
        return int(torch.multinomial(weights, 1, generator=self._generator))


class TextStream:
    """Turns tokens into text piece by piece, never splitting a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    @property
    def text(self) -> str:
        """All text so far."""
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def push(self, token: int) -> str:
        """Take one token; gives the text that is certain now."""
        self._ids.append(token)
        text = self.text
        if text.endswith("\ufffd"):
            return ""
        piece = text[self._shown :]
        self._shown = len(text)
        return piece
