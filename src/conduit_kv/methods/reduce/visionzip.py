"""VisionZip: dominant tokens as they are, and the rest merged into a few contextual ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.uniform import spread
from conduit_kv.methods.reduce.base import (
    Picked,
    ReduceMethod,
    Salient,
    likeness,
)
from conduit_kv.ranks import highest
from conduit_kv.view import StepView


@register
@dataclass(frozen=True)
class VisionZip(Salient, ReduceMethod):
    """Of ``n`` tokens, the share ``contextual`` (10 of 64, as published) are contextual.

    Dominant: the highest scores. Contextual: an even stride over the others gives the targets, and
    every other token joins the target that it is most like (cosine); a target becomes the mean of
    itself and those that joined it.

    Likeness is published for the image encoder's keys; here it is that of the embeddings that reach
    the language model, which every family has.

    Parameters
    ----------
    contextual : float
    score : {"encoder", "distinct", "norm"}
        See :data:`conduit_kv.methods.reduce.base.Salience`.
    """

    name: ClassVar[str] = "visionzip"
    paper: ClassVar[str] = "https://arxiv.org/abs/2412.04467"
    basis: ClassVar[str] = "reconstructed"

    contextual: float = 10 / 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.contextual <= 1:
            raise PlanError(f"{self.name}: contextual={self.contextual:g} is not in [0, 1]")

    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        states = view.hidden[places.to(view.hidden.device)].float()
        targets = min(round(count * self.contextual), max(count - 1, 0))
        dominant = highest(self.salience(view, places), count - targets)
        rest = torch.ones(len(places), dtype=torch.bool)
        rest[dominant] = False
        others = torch.nonzero(rest).flatten()
        if not targets:
            return dominant, states[dominant.to(states.device)]
        target = others[spread(targets, len(others))]
        joins = others[~torch.isin(others, target)]
        nearest = likeness(states).cpu()[joins][:, target].argmax(1)
        total = states[target.to(states.device)].clone()
        total.index_add_(0, nearest.to(states.device), states[joins.to(states.device)])
        size = 1 + torch.bincount(nearest, minlength=targets).to(states)
        merged = torch.cat([states[dominant.to(states.device)], total / size[:, None]])
        return torch.cat([dominant, target]), merged
