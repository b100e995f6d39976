"""TGV-KV: text-grounded eviction after prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import (
    carried,
    head_mean_twice,
    mean_column_sums,
    newest,
    sinks_and_last,
)
from conduit_kv.methods.evict.select import PROTECTED
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class TgvKv(EvictMethod):
    r"""Text-grounded visual eviction (arXiv 2606.03075): known, paper and authors' code.

    With :math:`A` the head-mean attention of a layer, :math:`i, j` text tokens after the first
    image and :math:`v` a visual token,

    .. math::
        w_j = \frac{\sum_{i \ge j} A_{ij}}{|\{i \ge j\}|}, \qquad
        s_v = \sum_j \hat w_j A_{jv}, \qquad
        b_l = B \frac{\sum_{jv} A^l_{jv}}{\sum_{l'} \sum_{jv} A^{l'}_{jv}}

    - TWR: :math:`s_v` ranks the visual tokens; :math:`\hat w` is :math:`w` over its sum.
    - TVB: :math:`b_l` is the budget of layer :math:`l`.
    - TPR: text stays before any visual token and is cut, lowest column sum first, only where
      :math:`b_l` is less than the text. The first four tokens and the last one always stay.

    Several images: the rows are all text after the first image, the columns all images; a row
    before an image gives it nothing. Text before the first image ranks as text. No image, or no
    text after it: the newest row takes the place of the text rows, and without visual tokens
    every layer keeps the same number, chosen by the text score. A later turn scores what is held
    and what is new with the rows of its own text.

    In decoding (``decode="share"``) a layer may hold its share of the tokens so far; the token that
    the newest query attends to least, mean over heads, goes. The first four tokens, the text of all
    prompts after the first image and the newest token stay; answers and visual tokens may go. When
    nothing else is left the cache grows.

    Parameters
    ----------
    redistribute : bool
        Give what a layer cannot hold to the others, so that the total is exactly the budget. False
        clips at what a layer has and rounds each layer by itself, as the authors' code does.
    text_score : {"text", "all"}
        Rows whose attention ranks the text: text rows, or all rows (the authors' code; one blocked
        pass over all of them).
    rows : {"text", "last", "all"}
        Rows :math:`i, j`: text after the first image, the newest token alone, or all tokens from
        the first visual one on, visual rows included.
    decode : {"share", "public", "off"}
        ``"public"`` is the authors' code: at most one token goes per step, and instead of the
        prompt's text a suffix as long as that text is protected, which slides on with each token.
        ``"off"`` evicts nothing in decoding.
    every : int
        Let a layer run up to so many tokens beyond its share in decoding, and then let them go
        together, least attended to by the newest query first. The paper's 1 looks at every layer in
        every step, which costs more than the step itself where the cache is small.
    """

    name: ClassVar[str] = "tgv-kv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2606.03075"
    in_decode: ClassVar[str] = (
        "a layer holds its share of the tokens so far: the visual or answer token that is attended "
        "to least goes"
    )

    redistribute: bool = True
    text_score: Literal["text", "all"] = "text"
    rows: Literal["text", "last", "all"] = "text"
    decode: Literal["share", "public", "off"] = "share"
    every: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise PlanError(f"{self.name}: every={self.every} is not a number of tokens from 1 on")
        if self.every > 1 and self.decode != "share":
            raise PlanError(
                f"{self.name}: every={self.every} is for decode=share, which lets any number of "
                f"tokens go in a step; decode={self.decode} does not"
            )

    def score(self, view: LayerView) -> Scores:
        text, visual = view.layout.text, view.layout.visual
        after = torch.arange(view.size) >= view.layout.first_visual
        rows = self._rows(view, text, after)

        attention = head_mean_twice(view, rows)
        received = torch.zeros(view.size)
        for _, weights in attention:
            received += weights.sum(0)

        # Row j is attended to by itself and the rows after it: R, R - 1, ..., 1 of them.
        weight = received[rows] / torch.arange(len(rows), 0, -1)
        weight = weight / weight.sum()
        score, done = torch.zeros(view.size), 0
        for block, weights in attention:
            score += weight[done : done + len(block)] @ weights
            done += len(block)

        score = torch.where(text, self._text_score(view, text, rows, received), score)
        return Scores(
            score,
            sinks_and_last(view, text.to(torch.int8)),
            weight=float(received[visual].double().sum()),
            carry=self._prompt_text(view, text & after),
        )

    def _rows(self, view: LayerView, text: Tensor, after: Tensor) -> Tensor:
        if self.rows == "last":
            return view.last_row
        rows = view.rows_where(after & text if self.rows == "text" else after)
        return rows if len(rows) else view.last_row

    def _text_score(self, view: LayerView, text: Tensor, rows: Tensor, received: Tensor) -> Tensor:
        """``[S]``: column sums over the rows that rank the text; ``received`` is over ``rows``."""
        wanted = view.rows if self.text_score == "all" else view.rows_where(text)
        if not len(wanted):
            return received
        known = torch.isin(rows, wanted).all()
        missing = wanted[~torch.isin(wanted, rows)] if known else wanted
        sums = mean_column_sums(view, missing)
        return received + sums if known else sums

    def _prompt_text(self, view: LayerView, prompt: Tensor) -> Tensor:
        """``[1, S]``: 1 at the prompts' text after the first image, of this turn and earlier."""
        own = torch.zeros(1, view.size)
        own[:, view.rows_where(prompt)] = 1
        return torch.maximum(own, (carried(view)[:1] > 0).float())

    def layer_budgets(
        self, total: int, scores: Sequence[Sequence[Scores]], most: Sequence[int]
    ) -> list[int]:
        if self.redistribute:
            return super().layer_budgets(total, scores, most)
        weights = [sum(group.weight or 0.0 for group in groups) for groups in scores]
        whole = sum(weights)
        shares = [weight / whole if whole else 1 / len(most) for weight in weights]
        return [
            min(length, max(floor, length - round(length - total * share)))
            for share, length, floor in zip(shares, most, self._floors(most), strict=True)
        ]

    @property
    def scores_steps(self) -> bool:
        # Over its visual tokens alone a layer never grows.
        return self.decode != "off" and self.of == "prompt"

    def score_step(self, view: LayerView) -> Scores:
        attention = view.newest_attention().mean(0).cpu()
        tier = sinks_and_last(view, torch.zeros(view.size, dtype=torch.int8))
        carry = carried(view)[:1]
        if self.decode == "share":
            prompt = carry[0] > 0
            return Scores(attention, tier.masked_fill_(prompt, PROTECTED), carry=carry)
        # Decoded tokens remember, as a negative number, how long the prompt's text was at first.
        first = int(carry[0].min()) == 0
        length = max(int((carry[0] > 0).sum()), 1) if first else -int(carry[0].min())
        carry = carry.clone()
        carry[:, -1] = -length
        return Scores(attention, newest(tier, length, PROTECTED), carry=carry)

    def step_waits(self, excess: int, *, remembers: bool) -> bool:
        if self.decode == "public":  # a decoded token remembers the suffix
            return super().step_waits(excess, remembers=remembers)
        return excess < self.every

    def step_drops(self, excess: int) -> int:
        return min(excess, 1) if self.decode == "public" else excess
