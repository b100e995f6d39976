"""Controls: visual tokens that stay by chance, or at an even stride."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.methods.base import register
from conduit_kv.methods.evict.parts import uniform_noise
from conduit_kv.methods.evict.uniform import thinned
from conduit_kv.methods.reduce.base import Picked, ReduceMethod
from conduit_kv.ranks import highest
from conduit_kv.view import StepView


@register
@dataclass(frozen=True)
class RandomReduce(ReduceMethod):
    """Tokens that stay by chance: a control, ours.

    Parameters
    ----------
    seed : int
    """

    name: ClassVar[str] = "random-reduce"

    seed: int = 0

    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        return highest(uniform_noise(self.seed, 0, view.index[places]), count), None


@register
@dataclass(frozen=True)
class UniformReduce(ReduceMethod):
    """Tokens at an even stride over each image's grid: a control, ours."""

    name: ClassVar[str] = "uniform-reduce"

    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        kept = torch.cat(thinned(view.layout, places, count))
        return torch.searchsorted(places, torch.sort(kept).values), None
