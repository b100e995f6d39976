"""LOOK-M: text first, and what is evicted is merged into what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import carried, newest
from conduit_kv.view import LayerView

_BLOCK = 1024  # evicted keys compared at a time


@register
@dataclass(frozen=True)
class LookM(EvictMethod):
    r"""Text prior and merging (arXiv 2406.18139): known, paper and authors' code.

    Each KV head ranks by the column sums of attention over all rows, as H2O: the newest tokens
    first (a share ``recent`` of the budget), then text, then visual tokens. Each evicted token
    :math:`e` goes to the kept token :math:`c` whose key, as it lies in the cache, is most similar
    by cosine; with :math:`E_c` those that come to :math:`c`,

    .. math:: k_c \leftarrow \frac{k_c + \sum_{e \in E_c} k_e}{1 + |E_c|}

    and values alike with the same pairs. All rows are needed: one blocked pass, whose cost is that
    of the attention itself.

    The sums go on over the rows of later turns. In decoding nothing more is evicted or merged,
    as in the authors' code.

    Parameters
    ----------
    recent : float
        Share of the budget that is kept for the newest tokens; one half as in the authors' scripts.
    merge_by : {"average", "pivot", "weighted", "none"}
        ``"pivot"`` replaces :math:`k_e` by :math:`(k_e + k_c) / 2`, ``"weighted"`` by
        :math:`\cos(k_e, k_c)\, k_e`; ``"none"`` leaves out the merging.
    """

    name: ClassVar[str] = "look-m"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.18139"

    recent: float = 0.5
    merge_by: Literal["average", "pivot", "weighted", "none"] = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent <= 1:
            raise PlanError(f"{self.name}: recent={self.recent:g} is not a share in [0, 1]")

    def score(self, view: LayerView) -> Scores:
        sums = carried(view) + view.column_sums(view.rows).cpu()
        return Scores(sums, view.layout.text.to(torch.int8), carry=sums)

    def _counted(self, view: LayerView, scores: Scores, budget: int) -> tuple[Tensor, int]:
        tier, total = super()._counted(view, scores, budget)
        return newest(tier, int(self.recent * budget), 2), total

    def merge(self, view: LayerView, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        if self.merge_by == "none" or all(len(tokens) == view.size for tokens in kept):
            return None
        keys, values = view.keys.clone(), view.values.clone()
        for head in range(view.kv_heads):
            tokens = kept[head if len(kept) > 1 else 0].to(keys.device)
            if not len(tokens):
                continue
            gone = torch.ones(view.size, dtype=torch.bool, device=keys.device)
            gone[tokens] = False
            evicted = torch.nonzero(gone).flatten()
            nearest, cosine = _nearest(view.keys[head], evicted, tokens)
            for merged, old in ((keys[head], view.keys[head]), (values[head], view.values[head])):
                merged[tokens] = self._merged(old.float(), tokens, evicted, nearest, cosine).to(
                    merged.dtype
                )
        return keys, values

    def _merged(
        self, old: Tensor, kept: Tensor, evicted: Tensor, nearest: Tensor, cosine: Tensor
    ) -> Tensor:
        """``[n, d]``: the kept of ``old`` ``[S, d]`` with the evicted folded in."""
        coming = old[evicted]
        if self.merge_by == "pivot":
            coming = (coming + old[kept][nearest]) / 2
        elif self.merge_by == "weighted":
            coming = coming * cosine[:, None]
        total = old[kept].index_add(0, nearest, coming)
        count = torch.bincount(nearest, minlength=len(kept)) + 1
        return total / count[:, None]


def _nearest(keys: Tensor, evicted: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """For each evicted key, which of the kept is most similar, and the cosine; ``[E]`` each."""
    unit = F.normalize(keys.float(), dim=-1)
    found = [(unit[block] @ unit[kept].T).max(1) for block in torch.split(evicted, _BLOCK)]
    return torch.cat([best.indices for best in found]), torch.cat([best.values for best in found])
