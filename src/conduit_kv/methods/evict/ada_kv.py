"""Ada-KV: the heads of a layer compete for its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import Scores
from conduit_kv.methods.evict.select import ranking
from conduit_kv.methods.evict.snapkv import SnapKv
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class AdaKv(SnapKv):
    r"""One choice over all heads of a layer (arXiv 2407.11550): known.

    Scores are SnapKV's. Of a layer's budget :math:`b` per KV head, each head first gets its own
    :math:`\lfloor \alpha b \rfloor` best tokens; the other places of the layer, :math:`G b` in all,
    go to the best (head, token) pairs of the layer, ties to the lower head. So heads differ in how
    many tokens they keep, and the ragged cache saves what they do not keep. This is kvpress' form;
    the authors' code first counts each head's part of one top-k and then mixes that count with the
    uniform one, :math:`(1 - \alpha)` to :math:`\alpha`.

    Nothing is evicted in decoding.

    Parameters
    ----------
    alpha : float
        Share of its uniform budget that a head gets in any case.
    """

    name: ClassVar[str] = "ada-kv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2407.11550"
    per_head: ClassVar[bool] = True

    alpha: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise PlanError(f"{self.name}: alpha={self.alpha:g} is not a share in [0, 1]")

    def select(self, groups: Sequence[tuple[LayerView, Scores]], budget: int) -> list[list[Tensor]]:
        orders, scores, tiers, sure, places = [], [], [], [], 0
        for view, given in groups:
            tier, mine = self._counted(view, given, budget)
            safe = int(self.alpha * mine)
            for head in given.token:
                orders.append(ranking(head, tier))
                scores.append(head)
                tiers.append(tier)
                sure.append(min(safe, view.size))
                places += mine
        counts = _share_places(places, orders, scores, tiers, sure)
        chosen, first = [], 0
        for view, given in groups:
            tier, _ = self._counted(view, given, budget)
            own = counts[first : first + view.kv_heads]
            first += view.kv_heads
            chosen.append(self._keep_heads(view, given.token, tier, own))
        return chosen


def _share_places(
    places: int,
    orders: Sequence[Tensor],
    scores: Sequence[Tensor],
    tiers: Sequence[Tensor],
    sure: Sequence[int],
) -> list[int]:
    """How many tokens each head keeps, of ``places`` in all and ``sure`` of them in any case."""
    rest = [order[count:] for order, count in zip(orders, sure, strict=True)]
    owner = torch.cat([torch.full_like(order, head) for head, order in enumerate(rest)])
    score = torch.cat([mine[order] for mine, order in zip(scores, rest, strict=True)])
    tier = torch.cat([mine[order] for mine, order in zip(tiers, rest, strict=True)])
    best = ranking(score, tier)[: max(places - sum(sure), 0)]
    won = torch.bincount(owner[best], minlength=len(orders)).tolist()
    return [count + more for count, more in zip(sure, won, strict=True)]
