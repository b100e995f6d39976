"""PyramidKV: SnapKV with fewer tokens in deeper layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from conduit_kv.budget import share_out
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import Scores
from conduit_kv.methods.evict.snapkv import SnapKv


@register
@dataclass(frozen=True)
class PyramidKv(SnapKv):
    r"""Budgets linear in depth (arXiv 2406.02069): known.

    Scores are SnapKV's. With :math:`L` layers of :math:`T` tokens, a window of :math:`w` rows and a
    budget of :math:`B`, every layer keeps its window and the rest, :math:`r = B / L - w` per layer,
    falls linearly from layer 0 to layer :math:`L - 1`,

    .. math:: b_l = w + b_0 - l \frac{b_0 - b_{L-1}}{L - 1}, \qquad
        b_{L-1} = r / \beta, \quad b_0 = 2 r - b_{L-1}

    and where :math:`b_0` exceeds :math:`T - w`, it is :math:`T - w` and :math:`b_{L-1}` rises to
    match. Where the budget does not hold the windows, all layers keep the same number. Rounding
    and limits are those of every method, so that the sum is exactly :math:`B`.

    Nothing is evicted in decoding.

    Parameters
    ----------
    beta : int
        Steepness, at least 1.
    schedule : {"paper", "kvpress"}
        ``"kvpress"`` applies the same line to the whole budget, window included (:math:`r = B / L`,
        no :math:`w` added), and gives all layers the same number where :math:`b_{L-1}` would be
        less than the window.
    """

    name: ClassVar[str] = "pyramidkv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.02069"

    beta: int = 20
    schedule: Literal["paper", "kvpress"] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise PlanError(f"{self.name}: beta={self.beta} is less than 1")

    def layer_budgets(
        self, total: int, scores: Sequence[Sequence[Scores]], most: Sequence[int]
    ) -> list[int]:
        floors = self._floors(most)
        longest = max(most, default=0)
        # Visual tokens alone are counted with of="visual"; the window is text.
        window = min(self.window, longest) if self.of == "prompt" else 0
        if self.schedule == "kvpress":
            low, high = self._ends(total / len(most), longest - window)
            if not longest >= high >= low >= window:
                return share_out(total, most, most, floors)
            return share_out(total, _line(high, low, len(most)), most, floors)
        windows = [min(window, length) for length in most]
        rest = total - sum(windows)
        if rest <= 0:
            return share_out(total, most, most, floors)
        low, high = self._ends(rest / len(most), longest - window)
        room = [length - mine for length, mine in zip(most, windows, strict=True)]
        least = [max(floor - mine, 0) for floor, mine in zip(floors, windows, strict=True)]
        line = share_out(rest, _line(high, low, len(most)), room, least)
        return [mine + more for mine, more in zip(windows, line, strict=True)]

    def _ends(self, mean: float, limit: int) -> tuple[float, float]:
        """The last layer's number and the first one's, whose mean is ``mean``."""
        low = mean / self.beta
        high = 2 * mean - low
        return (2 * mean - limit, float(limit)) if high >= limit else (low, high)


def _line(high: float, low: float, layers: int) -> list[float]:
    """``layers`` numbers from ``high`` to ``low``."""
    step = (high - low) / max(layers - 1, 1)
    return [high - layer * step for layer in range(layers)]
