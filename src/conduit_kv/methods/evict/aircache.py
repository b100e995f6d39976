"""AirCache: what a few telling text tokens attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.budget import share_out
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import head_mean_blocks, sinks_and_last
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class AirCache(EvictMethod):
    r"""Elite observation window (arXiv 2503.23956): idea known, details reconstructed.

    Known: not all text rows observe but an elite, text tokens whose attention from the last text
    token is at least :math:`\alpha` of the largest; a layer's budget follows from strength and
    skew of its visual scores; text is kept. Reconstructed: with :math:`n` the last text token,
    :math:`t` the text tokens after the first image, :math:`\hat A` attention renormalised over
    those columns and means over all query heads,

    .. math::
        a_t = \operatorname{mean}_h \hat A^h_{nt}, \qquad
        E = \{t : a_t \ge \alpha \max_{t'} a_{t'}\}, \qquad
        s_v = \operatorname{mean}_{i \in E} \operatorname{mean}_h A^h_{iv}

    .. math::
        b_l = |\text{text}_l| + \frac{B'}{2} \left(
            \frac{\sum_v s^l_v}{\sum_{l'} \sum_v s^{l'}_v} +
            \frac{\max(0, \operatorname{skew}_v s^l_v)}{\sum_{l'} \max(0, \operatorname{skew}_v
            s^{l'}_v)} \right)

    with :math:`B'` the budget less all text, and skew the third standardised moment. Text is cut,
    least attended by :math:`n` first, only where the budget does not hold it; then all layers keep
    the same number. The first four tokens and the last one always stay. No image, or no text after
    it: the newest row alone observes.

    Nothing is evicted in decoding.

    Parameters
    ----------
    alpha : float
        Share of the largest text attention from which on a text token observes.
    """

    name: ClassVar[str] = "aircache"
    paper: ClassVar[str] = "https://arxiv.org/abs/2503.23956"
    basis: ClassVar[str] = "reconstructed"

    alpha: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise PlanError(f"{self.name}: alpha={self.alpha:g} is not a share in [0, 1]")

    def score(self, view: LayerView) -> Scores:
        text = view.layout.text
        after = torch.arange(view.size) >= view.layout.first_visual
        rows = view.rows_where(text & after)
        rows = rows if len(rows) else view.last_row
        last = view.attention(rows[-1:])[:, 0].cpu()
        among = last[:, rows]
        telling = (among / among.sum(-1, keepdim=True).clamp(min=1e-30)).mean(0)
        elite = rows[telling >= self.alpha * telling.max()]
        score = torch.zeros(view.size)
        for _, attention in head_mean_blocks(view, elite):
            score += attention.sum(0) / len(elite)
        score = torch.where(text, last.mean(0), score)
        return Scores(score, sinks_and_last(view, text.to(torch.int8)))

    def layer_budgets(
        self, total: int, scores: Sequence[Sequence[Scores]], most: Sequence[int]
    ) -> list[int]:
        floors = self._floors(most)
        visual = [_visual_scores(groups[0]) for groups in scores]
        text = [
            length - min(len(mine), length) if self.of == "prompt" else 0
            for mine, length in zip(visual, most, strict=True)
        ]
        if total <= sum(text):
            return share_out(total, most, most, floors)
        strength = _normalised([float(mine.sum()) for mine in visual])
        skew = _normalised([_skew(mine) for mine in visual])
        weights = [a + b for a, b in zip(strength, skew, strict=True)]
        room = [length - mine for length, mine in zip(most, text, strict=True)]
        least = [max(floor - mine, 0) for floor, mine in zip(floors, text, strict=True)]
        shares = share_out(total - sum(text), weights, room, least)
        return [mine + more for mine, more in zip(text, shares, strict=True)]


def _visual_scores(scores: Scores) -> Tensor:
    """Scores of the visual tokens that may go: text and what always stays lie in higher tiers."""
    token = scores.token.double()
    return token if scores.tier is None else token[scores.tier == 0]


def _normalised(values: Sequence[float]) -> list[float]:
    """``values`` over their sum; all alike if that is 0."""
    total = sum(values)
    return [value / total if total else 1 / len(values) for value in values]


def _skew(values: Tensor) -> float:
    """Third standardised moment, 0 if it is negative or there is no spread."""
    if len(values) < 2:
        return 0.0
    centred = values - values.mean()
    deviation = float(centred.square().mean().sqrt())
    # Spread that is only rounding has no skew.
    if deviation <= 1e-7 * float(values.abs().max()):
        return 0.0
    return max(float((centred / deviation).pow(3).mean()), 0.0)
