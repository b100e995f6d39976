"""The evict stage: score the tokens of a layer, share the budget over layers, keep the best."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.budget import Budget, share_out
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import Method
from conduit_kv.methods.evict.select import PROTECTED, SINKS, keep_best
from conduit_kv.view import LayerView

FLOOR = SINKS + 1
"""Fewest tokens that a layer keeps: four sinks and the last one."""


@dataclass(frozen=True)
class Scores:
    """A method's opinion of the candidates of one view.

    Attributes
    ----------
    token : Tensor
        ``[S]`` fp32 for all KV heads alike, or ``[G, S]`` for each its own; higher is kept longer.
    tier : Tensor or None
        ``[S]`` int8. A token of a higher tier is kept before any of a lower one, whatever the
        scores. ``PROTECTED`` is never evicted.
    weight : float or None
        The layer's claim on the total budget (TGV-KV's TVB, VL-Cache's sparsity ...); the claims
        of a layer's groups of KV heads add up. None: as much as it has tokens, so that every layer
        keeps the same share.
    carry : Tensor or None
        ``[G, S]`` fp32, or ``[1, S]`` for all KV heads alike, handed back as ``view.carried`` for
        the tokens that were kept.
    """

    token: Tensor
    tier: Tensor | None = None
    weight: float | None = None
    carry: Tensor | None = None


@dataclass(frozen=True)
class EvictMethod(Method):
    """Base of the evict methods.

    Parameters
    ----------
    budget : Budget
        Prompt tokens kept, per sequence, mean over layers; with ``of="visual"`` visual tokens
        kept, all text besides.
    of : {"prompt", "visual"}
    per : {"sequence", "image"}
        ``"image"``: the visual tokens kept are shared over the images in proportion to their size.
    cover : float
        Share of the visual tokens kept that goes to tokens which cover the image; the rest goes by
        score.
    cover_by : {"grid", "features"}
        Cover the grid evenly, or be farthest from each other in the model's input space.
    """

    stage: ClassVar[str] = "evict"
    per_head: ClassVar[bool] = False
    """Whether KV heads of one layer may keep different numbers of tokens."""

    budget: Budget = field(default=Budget(1.0))
    of: Literal["prompt", "visual"] = "prompt"
    per: Literal["sequence", "image"] = "sequence"
    cover: float = 0.0
    cover_by: Literal["grid", "features"] = "grid"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.cover <= 1:
            raise PlanError(f"{self.name}: cover={self.cover:g} is not a share in [0, 1]")

    @property
    def is_identity(self) -> bool:
        return self.budget.is_everything

    @abstractmethod
    def score(self, view: LayerView) -> Scores:
        """Score the candidates at the end of a prefill or of a later turn's tokens.

        Scores do not depend on ``budget``, so that one scoring serves plans that differ in it.
        """

    @property
    def scores_steps(self) -> bool:
        """Whether decoded tokens are scored, by :meth:`score_step`."""
        return False

    def score_step(self, view: LayerView) -> Scores:
        """Score the candidates after one decoded token."""
        raise NotImplementedError(f"{self.name} evicts nothing in decoding")

    def step_waits(self, excess: int, *, remembers: bool) -> bool:
        """Whether a decoding step of a layer need not be scored.

        Parameters
        ----------
        excess : int
            Tokens that the layer holds beyond its share; 0 or less: none.
        remembers : bool
            Whether earlier scores carried something over.
        """
        return excess <= 0 and not remembers

    def step_drops(self, excess: int) -> int:
        """How many tokens may go in one decoding step when a layer is ``excess`` over its share."""
        return excess

    def layer_budgets(
        self, total: int, scores: Sequence[Sequence[Scores]], most: Sequence[int]
    ) -> list[int]:
        """Share ``total`` tokens over the layers.

        Parameters
        ----------
        total : int
            Tokens (``of="visual"``: visual tokens) kept in all layers together.
        scores : sequence of sequence of Scores
            Per layer, per group of KV heads with the same candidates.
        most : sequence of int
            Tokens that each layer has.
        """
        weights = [
            length if groups[0].weight is None else sum(s.weight or 0.0 for s in groups)
            for groups, length in zip(scores, most, strict=True)
        ]
        return share_out(total, weights, most, self._floors(most))

    def _floors(self, most: Sequence[int]) -> list[int]:
        floor = FLOOR if self.of == "prompt" else 0
        return [min(floor, length) for length in most]

    def select(self, groups: Sequence[tuple[LayerView, Scores]], budget: int) -> list[list[Tensor]]:
        """Choose what one layer keeps.

        Parameters
        ----------
        groups : sequence of (LayerView, Scores)
            The layer's groups of KV heads.
        budget : int
            Tokens kept per KV head (``of="visual"``: visual tokens).

        Returns
        -------
        list of list of Tensor
            Per group, per KV head: ``[n]`` int64 ascending, candidates kept. A group whose heads
            agree gives one tensor for all of them.
        """
        return [self.keep(view, scores, budget) for view, scores in groups]

    def keep(self, view: LayerView, scores: Scores, budget: int) -> list[Tensor]:
        """The candidates of one group kept under ``budget``, with ``of``, ``per``, ``cover``."""
        tier, budget = self._counted(view, scores, budget)
        heads = scores.token if scores.token.dim() == 2 else scores.token[None]
        return self._keep_heads(view, heads, tier, [budget] * len(heads))

    def _counted(self, view: LayerView, scores: Scores, budget: int) -> tuple[Tensor, int]:
        """Tier and budget over all tokens; with ``of="visual"`` the text is kept besides."""
        tier = scores.tier
        if tier is None:
            tier = torch.zeros(view.size, dtype=torch.int8)
        if self.of == "visual":
            tier = tier.masked_fill(view.layout.text, PROTECTED)
            budget += int(view.layout.text.sum())
        return tier, budget

    def _keep_heads(
        self, view: LayerView, heads: Tensor, tier: Tensor, budgets: Sequence[int]
    ) -> list[Tensor]:
        """Candidates kept by each head, scores ``[heads, S]``, each under its own budget."""
        rank = view.cover_rank(self.cover_by) if self.cover and view.cover_rank else None
        return [
            keep_best(
                head,
                tier,
                budget,
                view.layout,
                by_image=self.per == "image",
                cover=self.cover,
                cover_rank=rank,
            )
            for head, budget in zip(heads, budgets, strict=True)
        ]

    def merge(self, view: LayerView, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """K and V ``[G, S, d]`` with evicted tokens folded into kept ones; None: leave them."""
        return None
