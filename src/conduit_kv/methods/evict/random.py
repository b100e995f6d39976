"""Random: tokens kept by chance. The control that any score must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import uniform_noise
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class Random(EvictMethod):
    """Keep tokens by chance: a control, ours.

    Every token, text or visual, first or last, has the same chance; a layer draws for itself, its
    heads together. The draw depends on ``seed``, layer and place in the sequence alone, so that a
    later turn confirms what an earlier one kept.

    Nothing is evicted in decoding.

    Parameters
    ----------
    seed : int
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def score(self, view: LayerView) -> Scores:
        return Scores(uniform_noise(self.seed, view.layer, view.index))
