"""TGV-KV: text-grounded eviction after prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.select import PROTECTED
from conduit_kv.view import LayerView

_SINKS = 4


@register
@dataclass(frozen=True)
class TgvKv(EvictMethod):
    r"""Text-grounded visual eviction (arXiv 2606.03075): known, faithful to the paper.

    With :math:`A` the head-mean attention of a layer, :math:`i, j` text tokens after the first
    image and :math:`v` a visual token,

    .. math::
        w_j = \frac{\sum_{i \ge j} A_{ij}}{|\{i \ge j\}|}, \qquad
        s_v = \sum_j \hat w_j A_{jv}, \qquad
        b_l = B \frac{\sum_{jv} A^l_{jv}}{\sum_{l'} \sum_{jv} A^{l'}_{jv}}

    TWR: :math:`s_v` ranks the visual tokens (:math:`\hat w` is :math:`w` normalised). TVB:
    :math:`b_l` is the budget of layer :math:`l`. TPR: text stays before any visual token and is cut,
    lowest column sum first, only where :math:`b_l` is less than the text; the first four tokens
    and the last one always stay.

    Parameters
    ----------
    redistribute : bool
        Give what a layer cannot hold to the others, so that the total is exact. False clips, as
        the public code does.
    text_score : {"text", "all"}
        Rows whose attention ranks the text: text rows, or all rows (the public code).
    rows : {"text", "last"}
        Rows that rank the visual tokens: all text after the first image, or the last token alone.
    decode : {"share", "public", "off"}
        In decoding a layer may hold its share of the tokens so far; the token that the newest query
        attends to least goes. Sinks, prompt text after the first image and the newest token stay;
        when nothing else is left the cache grows. ``"public"`` drops at most one token a step;
        its protected suffix slides. ``"off"`` evicts nothing while decoding.
    """

    name: ClassVar[str] = "tgv-kv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2606.03075"
    in_decode: ClassVar[str] = "each layer keeps its share of the tokens so far"

    redistribute: bool = True
    text_score: Literal["text", "all"] = "text"
    rows: Literal["text", "last"] = "text"
    decode: Literal["share", "public", "off"] = "share"

    def score(self, view: LayerView) -> Scores:
        text = view.layout.text
        after = text.clone()
        after[: view.layout.first_visual] = False
        grounding = view.rows_where(after)
        if self.rows == "last" or not len(grounding):
            grounding = view.last_row

        received = _column_sums(view, grounding)
        # Rows at or after j that attend to j; a column of an earlier turn is seen by all of them.
        seen_by = (grounding[None, :] >= torch.arange(view.size)[:, None]).sum(1)
        weight = torch.where(after, received / seen_by.clamp(min=1), 0.0)
        row_weight = weight[grounding]
        row_weight = row_weight / row_weight.sum().clamp(min=1e-12)

        score = torch.zeros(view.size)
        for block, attention in view.attention_blocks(grounding):
            at = torch.searchsorted(grounding, block)
            score += row_weight[at] @ attention.mean(0).cpu()

        text_rows = view.rows if self.text_score == "all" else view.rows_where(text)
        text_sums = received if torch.equal(text_rows, grounding) else _column_sums(view, text_rows)
        score = torch.where(text, text_sums, score)

        tier = text.to(torch.int8)
        tier[view.index < _SINKS] = PROTECTED
        tier[-1] = PROTECTED
        return Scores(score, tier, weight=float(received[view.layout.visual].sum()))
