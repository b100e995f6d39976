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
    """Keep everything."""

    name: ClassVar[str] = "full"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.budget.is_everything:
            raise PlanError("full keeps everything and takes no budget: choose another method")

    def score(self, view: LayerView) -> Scores:
        return Scores(torch.zeros(view.size))
