"""The reuse stage: which visual tokens of a reused image are computed again, and which are not."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.budget import Budget
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import Method
from conduit_kv.ranks import highest


@dataclass
class ReuseView:
    """One layer of stage 1: the text has run, the images are there as stored K/V only.

    Attributes
    ----------
    layer, n_layers : int
    image : Tensor
        ``[V]`` int64, the image of each visual token of the step, in order.
    values : Tensor
        ``[G, V, d]``, as stored.
    attend : callable
        Behind :attr:`attention`.
    deviation : Tensor or None
        ``[G, V, d]``, how much the values of layer 1 change if layer 0 is computed again.
    """

    layer: int
    n_layers: int
    image: Tensor
    values: Tensor
    attend: Callable[[], Tensor] = field(repr=False)
    deviation: Tensor | None = None

    @cached_property
    def attention(self) -> Tensor:
        """``[V]`` fp32: softmax over all visible keys, mean over heads and the query span."""
        return self.attend()

    @property
    def value_norms(self) -> Tensor:
        """``[V]`` fp32: the Euclidean norm of a token's values, all KV heads together."""
        return self.values.float().pow(2).sum((0, 2)).sqrt()


@dataclass(frozen=True)
class ReuseMethod(Method):
    """Base of the reuse methods.

    Parameters
    ----------
    budget : Budget
        Visual tokens refreshed: a share of those of the prompt, or a number.
    context : {"template", "none"}
        What stood before an image when its K/V were made: the start of the chat template, or
        nothing.
    refresh_text : bool
        Compute all text again in stage 2, not the query span alone; but not the text that the
        prompt begins with where it is stored, since nothing can change it.
    """

    stage: ClassVar[str] = "reuse"
    in_decode: ClassVar[str] = "nothing"
    scores_layers: ClassVar[bool] = False
    """Whether stage 1 is listened to."""
    needs_deviation: ClassVar[bool] = False
    """Whether :attr:`ReuseView.deviation` is computed: layer 0 of stage 1 runs over images too."""
    in_one_pass: ClassVar[bool] = False
    """Whether there is a single pass, from which visual tokens leave layer by layer."""

    budget: Budget = field(default=Budget(1.0))
    context: Literal["template", "none"] = "template"
    refresh_text: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget.unit == "bytes":
            raise PlanError(
                f"{self.name} counts visual tokens that are computed again, not bytes: write "
                f"{self.name}:0.1 for a share or {self.name}:64 for a number"
            )

    @property
    def is_identity(self) -> bool:
        return self.budget.is_everything

    def count(self, visual: int) -> int:
        """How many of so many visual tokens are refreshed: a share is rounded up."""
        if self.budget.unit == "share":
            return min(visual, math.ceil(self.budget.value * visual - 1e-9))
        return min(int(self.budget.value), visual)

    def listens_to(self, layer: int, n_layers: int, images: int) -> bool:
        """Whether a layer of stage 1 is scored."""
        return self.scores_layers

    def score(self, view: ReuseView) -> Tensor:
        """``[V]`` fp32, one layer's opinion of what is worth refreshing; higher is refreshed."""
        raise NotImplementedError

    def counts(self, visual: int, n_layers: int) -> list[int]:
        """Visual tokens that run in each layer of stage 2, or of the single pass."""
        return [self.count(visual)] * n_layers

    @abstractmethod
    def choose(self, scores: Sequence[Tensor], image: Tensor) -> Tensor:
        """Which visual tokens are refreshed, in every layer.

        Parameters
        ----------
        scores : sequence of Tensor
            ``[V]`` per layer listened to.
        image : Tensor
            ``[V]`` int64, the image of each.

        Returns
        -------
        Tensor
            Int64 ascending, places among the ``V``.
        """


def top(score: Tensor, count: int) -> Tensor:
    """Places of the ``count`` highest scores, ascending; ties go to the lower index."""
    return highest(score, count).sort().values


def mean_of(scores: Sequence[Tensor]) -> Tensor:
    """``[V]``, the mean over layers."""
    return torch.stack([score.float().cpu() for score in scores]).mean(0)
