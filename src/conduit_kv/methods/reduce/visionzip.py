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
    SALIENCE,
    Picked,
    ReduceMethod,
    Salience,
    likeness,
    salience,
)
from conduit_kv.ranks import highest
from conduit_kv.view import StepView


@register
@dataclass(frozen=True)
class VisionZip(ReduceMethod):
    """Of ``n`` tokens, the share ``contextual`` (10 of 64, as published) are contextual.

    Dominant: the highest scores. Contextual: an even stride over the others gives the targets, and
    every other token joins the target that it is most like (cosine); a target becomes the mean of
    itself and those that joined it.

    The published score is the class token's attention in the image encoder, and likeness that of
    its keys. Here both come from what every family has, the embeddings that reach the language
    model; see :data:`conduit_kv.methods.reduce.base.Salience`.

    Parameters
    ----------
    contextual : float
    score : {"distinct", "norm"}
    """

    name: ClassVar[str] = "visionzip"
    paper: ClassVar[str] = "https://arxiv.org/abs/2412.04467"
    basis: ClassVar[str] = "reconstructed"

    contextual: float = 10 / 64
    score: Salience = "distinct"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.contextual <= 1:
            raise PlanError(f"{self.name}: contextual={self.contextual:g} is not in [0, 1]")

    @property
    def note(self) -> str:
        return SALIENCE[self.score]

    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        states = view.hidden[places.to(view.hidden.device)].float()
        targets = min(round(count * self.contextual), max(count - 1, 0))
        dominant = highest(salience(states, self.score), count - targets)
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
