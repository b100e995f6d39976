"""PrefixKV: every layer keeps the same share of its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import carried, mean_column_sums, sinks_and_last
from conduit_kv.methods.evict.select import PROTECTED
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class PrefixKv(EvictMethod):
    r"""One threshold for all layers (arXiv 2412.03409): known, paper and authors' code.

    With :math:`A` the head-mean attention and all rows :math:`i` so far,

    .. math:: s_j = \sum_i A_{ij}

    and layer :math:`l` keeps the shortest prefix of its tokens, largest :math:`s` first, that holds
    a share :math:`p` of their sum. One :math:`p` serves all layers: the largest whose prefixes fit
    the budget. The paper finds it by bisection; here the tokens of all layers are sorted by the
    share that lies before them, which finds the same :math:`p` and meets the budget exactly (of
    layers that tie, the lower takes the last place). The first four tokens and the last one always
    stay. Text and visual tokens are alike. All rows are needed: one blocked pass, whose cost is
    that of the attention itself.

    The sums go on over the rows of later turns. In decoding nothing more is evicted; the authors'
    code drops the token at a fixed distance of 25 from the end of what the prompt kept.
    """

    name: ClassVar[str] = "prefixkv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2412.03409"

    def score(self, view: LayerView) -> Scores:
        sums = carried(view)[0] + mean_column_sums(view, view.rows)
        if self.of == "visual":
            tier = torch.zeros(view.size, dtype=torch.int8).masked_fill(view.layout.text, PROTECTED)
        else:
            tier = sinks_and_last(view, torch.zeros(view.size, dtype=torch.int8))
        return Scores(sums, tier, carry=sums[None])

    def layer_budgets(
        self, total: int, scores: Sequence[Sequence[Scores]], most: Sequence[int]
    ) -> list[int]:
        floors = self._floors(most)
        if sum(floors) >= total:
            return floors
        before = []
        for (group, *_), floor in zip(scores, floors, strict=True):
            mass = _counted_mass(group, self.of == "visual")
            share = (mass.cumsum(0) - mass) / mass.sum().clamp(min=1e-300)
            share[:floor] = -1.0
            before.append(share)
        layer = torch.cat([torch.full_like(b, i, dtype=torch.long) for i, b in enumerate(before)])
        order = torch.sort(torch.cat(before), stable=True).indices
        return torch.bincount(layer[order[:total]], minlength=len(before)).tolist()


def _counted_mass(scores: Scores, visual_only: bool) -> Tensor:
    """Sums of the tokens that the budget counts, largest first."""
    mass = scores.token.double()
    if visual_only and scores.tier is not None:
        mass = mass[scores.tier != PROTECTED]
    return torch.sort(mass, descending=True).values
