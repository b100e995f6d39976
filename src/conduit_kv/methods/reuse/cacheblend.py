"""CacheBlend: refresh what deviates most, fewer tokens in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from conduit_kv.budget import largest_remainder
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.reuse.base import ReuseMethod, top


@register
@dataclass(frozen=True)
class CacheBlend(ReuseMethod):
    r"""Gradual filtering by K/V deviation (arXiv 2405.16444): known.

    One pass. Layer 0 runs over everything. Before each later layer :math:`\ell` the tokens that
    still run are ranked by how far their new K and V are from the stored ones,

    .. math:: d_\ell(t) = \lVert K'_\ell(t) - K_\ell(t) \rVert_2
        + \lVert V'_\ell(t) - V_\ell(t) \rVert_2

    and the best run on, :math:`n_\ell` of them: a number that falls linearly, from :math:`1 +
    \text{slope}` times the budget in layer 1 to :math:`1 - \text{slope}` times in the last, so that
    its mean over the layers after the first is the budget. All text runs everywhere. The question
    is not asked.

    Parameters
    ----------
    slope : float
        In [0, 1].
    """

    name: ClassVar[str] = "cacheblend"
    paper: ClassVar[str] = "https://arxiv.org/abs/2405.16444"

    in_one_pass: ClassVar[bool] = True

    slope: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.slope <= 1:
            raise PlanError(f"{self.name}: slope={self.slope:g} is not in [0, 1]")

    def counts(self, visual: int, n_layers: int) -> list[int]:
        later = n_layers - 1
        mean = self.count(visual)
        if later < 1:
            return [visual]
        exact = [
            min(visual, mean * (1 + self.slope * (1 - 2 * n / max(later - 1, 1))))
            if later > 1
            else mean
            for n in range(later)
        ]
        rounded = largest_remainder(exact, min(round(sum(exact)), visual * later))
        return [visual, *(min(count, visual) for count in rounded)]

    def choose(self, scores: Sequence[Tensor], image: Tensor) -> Tensor:
        return top(scores[-1], self.count(len(image)))
