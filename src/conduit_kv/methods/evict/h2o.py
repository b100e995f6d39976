"""H2O: heavy hitters and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import carried, newest
from conduit_kv.methods.evict.select import PROTECTED
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class H2O(EvictMethod):
    r"""Heavy-hitter oracle (arXiv 2306.14048): known.

    With all rows :math:`i` so far and the query heads :math:`h` of KV head :math:`g`,

    .. math:: s^g_j = \operatorname{mean}_h \sum_i A^h_{ij}

    Of the budget a share ``recent`` is kept for the newest tokens, the others go to the largest
    sums; the paper has one half each. Text and visual tokens are alike. All rows are needed: one
    blocked pass, whose cost is that of the attention itself.

    The sums go on over later turns and decoded tokens. In decoding the token of smallest sum goes
    that is not among the newest (the same share of what is held). Where each head has its own
    tokens, each must drop its own; where they cannot, nothing is evicted in decoding.

    Parameters
    ----------
    recent : float
        Share of the budget that is kept for the newest tokens.
    heads : {"each", "all"}
        ``"each"``: every KV head keeps its own tokens, as published. ``"all"``: sums are averaged
        over the KV heads, which then keep the same tokens.
    decode : {"share", "off"}
        ``"off"`` evicts nothing in decoding.
    """

    name: ClassVar[str] = "h2o"
    paper: ClassVar[str] = "https://arxiv.org/abs/2306.14048"
    in_decode: ClassVar[str] = (
        "sums go on; the smallest that is not recent goes, where KV heads hold the same tokens "
        "(heads=all)"
    )

    recent: float = 0.5
    heads: Literal["each", "all"] = "each"
    decode: Literal["share", "off"] = "share"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent <= 1:
            raise PlanError(f"{self.name}: recent={self.recent:g} is not a share in [0, 1]")

    def score(self, view: LayerView) -> Scores:
        sums = carried(view) + view.column_sums(view.rows).cpu()
        return Scores(self._token(sums), carry=sums)

    def _token(self, sums: Tensor) -> Tensor:
        return sums if self.heads == "each" else sums.mean(0)

    def _counted(self, view: LayerView, scores: Scores, budget: int) -> tuple[Tensor, int]:
        tier, total = super()._counted(view, scores, budget)
        return newest(tier, int(self.recent * budget), 1), total

    @property
    def scores_steps(self) -> bool:
        return self.decode != "off"

    def score_step(self, view: LayerView) -> Scores:
        sums = carried(view) + view.group_mean(view.newest_attention()).cpu()
        # Over its visual tokens alone a layer never grows; the sums go on all the same.
        level = PROTECTED if self.of == "visual" else 0
        tier = torch.full((view.size,), level, dtype=torch.int8)
        recent = int(self.recent * (view.size - 1))
        return Scores(self._token(sums), newest(tier, recent, PROTECTED), carry=sums)
