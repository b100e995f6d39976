"""Text-random: all text, and visual tokens by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import sinks_and_last, uniform_noise
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class TextRandom(EvictMethod):
    """Keep text first, then visual tokens by chance: a control, ours.

    What a text-first method must beat. The first four tokens and the last one always stay; text is
    cut, by chance too, only where a layer's budget is less than its text. The draw depends on
    ``seed``, layer and place in the sequence alone.

    Nothing is evicted in decoding.

    Parameters
    ----------
    seed : int
    """

    name: ClassVar[str] = "text-random"

    seed: int = 0

    def score(self, view: LayerView) -> Scores:
        return Scores(
            uniform_noise(self.seed, view.layer, view.index),
            sinks_and_last(view, view.layout.text.to(torch.int8)),
        )
