"""What the reduce and route stages have in common: which visual tokens run through which layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.budget import Budget
from conduit_kv.errors import PlanError
from conduit_kv.layout import Layout
from conduit_kv.methods.base import Method
from conduit_kv.methods.schedule import Schedule
from conduit_kv.ranks import highest
from conduit_kv.view import StepView

Flops = Callable[[Sequence[int]], float]
"""FLOPs of a prefill from its visual tokens per layer (the text is counted besides)."""


@dataclass(frozen=True)
class Chosen:
    """What a method decides for one sequence before one layer.

    Attributes
    ----------
    active : Tensor
        ``[c]`` int64 ascending, places in the view: the visual tokens that run on. Text always
        does, and so does the newest token.
    hidden : Tensor or None
        ``[c, D]``, their states where the method changes them (merging); None: as they are.
    note : str
        What could not be done, and why.
    """

    active: Tensor
    hidden: Tensor | None = None
    note: str = ""


@dataclass(frozen=True)
class FlowMethod(Method):
    """Base of the methods that decide, before some layers, which visual tokens run on.

    Parameters
    ----------
    budget : Budget
        Visual tokens active, mean over all layers: a share of those of the turn (a decimal), or a
        number per turn that brings images (an integer).
    """

    listens_to: ClassVar[Literal["newest", "all"]] = "newest"
    """Whose queries in the layer before a decision: see :meth:`listens_before`."""

    budget: Budget = field(default=Budget(1.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget.unit == "bytes":
            raise PlanError(
                f"{self.name} counts visual tokens, not bytes: write {self.name}:0.33 for a share "
                f"or {self.name}:64 for a number, mean over layers"
            )

    def check_beside(self, others: Sequence[Method]) -> None:
        super().check_beside(others)
        for other in others:
            if other.stage == "reuse" and not (self.is_identity or other.is_identity):
                raise PlanError(
                    f"{self.name} acts on a prompt's prefill, and with {other.name} images are not "
                    f"prefilled in the prompt but taken from entries: leave one of them out"
                )

    @property
    def is_identity(self) -> bool:
        return self.budget.is_everything

    @property
    def looks(self) -> bool:
        """Whether decisions read how much the image encoder looked at each token."""
        return False

    @property
    def waits(self) -> bool:
        """Whether tokens that do not run wait and may come back; else they are gone for good."""
        return False

    def mean_active(self, visual: int) -> float:
        """Visual tokens active that the budget asks for, mean over layers, of ``visual``."""
        if self.budget.unit == "share":
            return self.budget.value * visual
        return min(self.budget.value, visual)

    def check(self, n_layers: int) -> None:
        """Raise PlanError if a model of so many layers cannot carry the method out."""

    @abstractmethod
    def schedule(self, n_layers: int, layout: Layout, flops: Flops) -> Schedule | None:
        """When to decide, and how many visual tokens run on; None: all of them, everywhere.

        Parameters
        ----------
        layout : Layout
            Of the turn's tokens of one sequence.

        Raises
        ------
        PlanError
            If the budget cannot be met; the message names the smallest that can.
        """

    @abstractmethod
    def choose(self, view: StepView, count: int) -> Chosen:
        """Which ``count`` of the view's visual tokens run on."""

    def listens_before(self, layer: int, schedule: Schedule) -> bool:
        """Whether queries in the layer before ``layer`` are needed by the decision before it."""
        return False

    def contiguous(self, axes: int) -> bool:
        """Whether tokens that run on take positions without gaps, which have so many axes.

        Raises
        ------
        PlanError
            If the method was told to and cannot.
        """
        return False


def best(score: Tensor, view: StepView, count: int) -> Tensor:
    """Places of the ``count`` visual tokens of highest ``score``, ascending.

    Parameters
    ----------
    score : Tensor
        ``[R]`` of all of the view's tokens; ties go to the lower index, not-a-number ranks last.
        Where the newest token is a visual one it comes first: the answer begins there.
    """
    score = torch.nan_to_num(score.float().cpu(), nan=float("-inf"))
    places = torch.nonzero(view.layout.visual).flatten()
    score = score[places]
    if view.layout.visual[-1]:
        score[-1] = torch.inf
    return torch.sort(places[highest(score, count)]).values
