"""VL-Cache: what the text after the images attends to, with budgets by sparsity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import after_images, newest
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class VlCache(EvictMethod):
    r"""Post-vision attention (arXiv 2410.23317): known, details after EffiVLM-Bench.

    With :math:`P` the text rows after the last image, :math:`V_i` the columns that row :math:`i`
    sees and the query heads :math:`h` of KV head :math:`g`,

    .. math::
        s^g_j = \operatorname{mean}_h \sum_{i \in P} A^h_{ij}, \qquad
        \gamma_l = 1 - \operatorname{mean}_h \frac{
            |\{i \in P, j : A^h_{ij} \ge p \max_{j'} A^h_{ij'}\}|}{\sum_{i \in P} |V_i|},
        \qquad b_l = B \frac{1 - \gamma_l}{\sum_{l'} (1 - \gamma_{l'})}

    Each KV head keeps its own tokens. A share ``recent`` of a layer's budget goes to its newest
    tokens. Text and visual tokens are alike. The paper holds :math:`b_l` between 1 and 100 % of the
    tokens; here limits and rounding are those of every method. No image: all rows count. No text
    after the last image: the newest row does.

    Nothing is evicted in decoding.

    Parameters
    ----------
    threshold : float
        :math:`p`, share of a row's maximum below which an entry counts as zero.
    recent : float
        Share of a layer's budget that is kept for the newest tokens.
    """

    name: ClassVar[str] = "vl-cache"
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.23317"

    threshold: float = 0.01
    recent: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("threshold", "recent"):
            if not 0 <= getattr(self, key) <= 1:
                raise PlanError(f"{self.name}: {key}={getattr(self, key):g} is not in [0, 1]")

    def score(self, view: LayerView) -> Scores:
        rows = after_images(view)
        sums = view.keys.new_zeros((view.heads, view.size), dtype=torch.float32)
        dense = 0
        for block, attention in view.attention_blocks(rows):
            sums += attention.sum(1)
            seen = torch.arange(view.size) <= block[:, None]
            large = attention >= self.threshold * attention.amax(-1, keepdim=True)
            dense += int((large & seen.to(large.device)).sum())
        visible = view.heads * int((rows + 1).sum())
        # Claims of a layer's groups of heads add up, so each counts for its heads.
        weight = dense / visible * view.kv_heads
        return Scores(view.group_mean(sums).cpu(), weight=weight)

    def _counted(self, view: LayerView, scores: Scores, budget: int) -> tuple[Tensor, int]:
        tier, total = super()._counted(view, scores, budget)
        return newest(tier, int(self.recent * budget), 1), total
