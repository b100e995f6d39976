"""What a selection is compared with: the first tokens, random ones, none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.budget import largest_remainder
from conduit_kv.methods.base import register
from conduit_kv.methods.reuse.base import ReuseMethod


@register
@dataclass(frozen=True)
class FirstRefresh(ReuseMethod):
    """The first tokens of each image, in proportion to its size, as EPIC and MPIC do: known.

    When an image was prefilled alone its first tokens were attention sinks, which they are no more.
    """

    name: ClassVar[str] = "first-refresh"
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.15332"

    def choose(self, scores: Sequence[Tensor], image: Tensor) -> Tensor:
        sizes = torch.bincount(image).tolist()
        total = self.count(len(image))
        share = total / max(len(image), 1)
        counts = largest_remainder([size * share for size in sizes], total)
        parts = [
            (image == number).nonzero().flatten()[:count] for number, count in enumerate(counts)
        ]
        return torch.cat(parts).sort().values


@register
@dataclass(frozen=True)
class RandomRefresh(ReuseMethod):
    """Random tokens over all images: the control.

    Parameters
    ----------
    seed : int
    """

    name: ClassVar[str] = "random-refresh"

    seed: int = 0

    def choose(self, scores: Sequence[Tensor], image: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(image), generator=generator)
        return order[: self.count(len(image))].sort().values


@register
@dataclass(frozen=True)
class ReuseAll(ReuseMethod):
    """Full reuse: no visual token is computed again, and the answer follows from stage 1."""

    name: ClassVar[str] = "reuse-all"

    @classmethod
    def takes_budget(cls) -> bool:
        return False

    @property
    def is_identity(self) -> bool:
        return False

    def count(self, visual: int) -> int:
        return 0

    def choose(self, scores: Sequence[Tensor], image: Tensor) -> Tensor:
        return image[:0]
