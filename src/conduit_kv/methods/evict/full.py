"""Full: the identity, every token stays. The reference of every comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class Full(EvictMethod):
    """Keep everything. Nothing is evicted in decoding."""

    name: ClassVar[str] = "full"
    in_decode: ClassVar[str] = "nothing is evicted"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.budget.is_everything or self.cover:
            raise PlanError("full keeps everything: it takes no budget and no cover")

    @classmethod
    def takes_budget(cls) -> bool:
        return False

    def score(self, view: LayerView) -> Scores:
        return Scores(torch.zeros(view.size))
