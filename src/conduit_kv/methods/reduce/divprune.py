"""DivPrune: keep the tokens that are most unlike each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.methods.base import register
from conduit_kv.methods.reduce.base import Picked, ReduceMethod, likeness
from conduit_kv.view import StepView


@register
@dataclass(frozen=True)
class DivPrune(ReduceMethod):
    r"""Greedy max-min diversity in the cosine distance :math:`d_{ij} = 1 - \cos(x_i, x_j)`.

    The first token is the one whose nearest neighbour is farthest; the next always the one whose
    nearest among those taken is farthest. Ties go to the lower index.
    """

    name: ClassVar[str] = "divprune"
    paper: ClassVar[str] = "https://arxiv.org/abs/2503.02175"

    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        distance = 1.0 - likeness(view.hidden[places.to(view.hidden.device)]).cpu()
        kept: list[int] = []
        if count:
            others = distance.clone().fill_diagonal_(torch.inf)
            kept.append(int(others.min(1).values.argmax()))
        nearest = torch.full((len(places),), torch.inf)
        while len(kept) < count:
            nearest = torch.minimum(nearest, distance[kept[-1]])
            nearest[kept[-1]] = -torch.inf
            kept.append(int(nearest.argmax()))
        return torch.tensor(kept, dtype=torch.long), None
