"""Nuwa, first stage: tokens that stand for their place, with what lies around them merged in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.budget import Budget
from conduit_kv.methods.base import register
from conduit_kv.methods.flow import FlowMethod
from conduit_kv.methods.reduce.base import (
    Picked,
    ReduceMethod,
    Salient,
    likeness,
)
from conduit_kv.methods.route.reroute import Delete
from conduit_kv.ranks import highest
from conduit_kv.view import StepView


@register
@dataclass(frozen=True)
class NuwaReduce(Salient, ReduceMethod):
    r"""Separate, align, aggregate: a swarm of local leaders.

    In each 2 x 2 cell of the grid the best ``ceil(n / cells)`` tokens by score, then the best ``n``
    over all. Into each of them merges what is like it and near it,

    .. math:: W_{ij} = \mathrm{relu}(\cos(x_i, x_j)) \; \max(0, 1 - d_{ij} / r),
       \quad r = \sqrt{280} \, side / 24

    with the distance of their places on the grid; rows are normalised to 1 and the token's own
    weight is then set to 1. Tokens at or above the 55th percentile of the scores kept take no
    merge.

    The published method acts in the image encoder, before the projector, with the likeness of late
    layers' states. Here it acts on the embeddings that reach the language model and their
    likeness, and rows are scaled to sum to 1, since no projector follows that was trained on larger
    norms.

    Parameters
    ----------
    merge : bool
        False leaves the tokens kept as they are.
    score : {"encoder", "distinct", "norm"}
        See :data:`conduit_kv.methods.reduce.base.Salience`.
    """

    name: ClassVar[str] = "nuwa-reduce"
    paper: ClassVar[str] = "https://arxiv.org/abs/2602.02951"
    basis: ClassVar[str] = "reconstructed"

    merge: bool = True

    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        states = view.hidden[places.to(view.hidden.device)].float()
        score = self.salience(view, places)
        layout = view.layout
        frame, row, column = layout.places[1:, places]
        width = int(column.max()) + 2
        cell = (frame * (int(row.max()) + 2) + row // 2) * width + column // 2
        kept = leaders(score, cell, count)
        if not self.merge or not count:
            return kept, states[kept.to(states.device)]
        reach = math.sqrt(280) * (max(int(row.max()), int(column.max())) + 1) / 24
        apart = torch.stack([row, column], 1).float()
        near = (1 - torch.cdist(apart[kept], apart) / reach).clamp(min=0)
        near = near * (frame[kept][:, None] == frame[None])
        weight = likeness(states).cpu()[kept].clamp(min=0) * near
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1e-12)
        own = torch.arange(len(kept))
        weight[own, kept] = 1.0
        weight = weight / weight.sum(1, keepdim=True)
        alone = score[kept] >= torch.quantile(score[kept], 0.55)
        weight[alone] = 0.0
        weight[own, kept] = torch.where(alone, torch.ones(()), weight[own, kept])
        return kept, weight.to(states.device) @ states


def leaders(score: Tensor, cell: Tensor, count: int) -> Tensor:
    """``[count]`` int64: the best of each cell, then the best of all of these.

    Parameters
    ----------
    score, cell : Tensor
        ``[N]``.
    """
    order = highest(score, len(score))
    ranked = cell[order]
    by_cell = torch.sort(ranked, stable=True).indices
    runs = torch.unique_consecutive(ranked[by_cell], return_counts=True)[1]
    starts = torch.repeat_interleave(runs.cumsum(0) - runs, runs)
    place = torch.empty_like(by_cell)
    place[by_cell] = torch.arange(len(order)) - starts  # of a token among those of its cell
    each = -(-count // max(len(runs), 1))
    while int((place < each).sum()) < count:  # cells at the border are smaller
        each += 1
    return order[place < each][:count]


def nuwa(budget: Budget) -> tuple[FlowMethod, FlowMethod]:
    """Both of Nuwa's stages at a mean of ``budget`` visual tokens over all layers.

    The first keeps 4/3 of it and the second, at half depth, half of what is left, so that the mean
    is met; beyond 3/4 of all tokens the first keeps all. (The published split is not known to us.)
    """
    if budget.unit == "tokens":
        first = Budget(float(math.ceil(budget.value * 4 / 3)), "tokens")
        return NuwaReduce(first), Delete(budget, rank="nuwa")
    share = min(1.0, budget.value * 4 / 3)
    return NuwaReduce(Budget(share)), Delete(Budget(min(1.0, budget.value / share)), rank="nuwa")
