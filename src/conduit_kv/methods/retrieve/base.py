"""The retrieve stage: which of the stored visual tokens a question sees."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from conduit_kv.budget import Budget
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import Method
from conduit_kv.methods.hold.base import HoldMethod
from conduit_kv.ranks import highest

if TYPE_CHECKING:
    from conduit_kv.retrieve.bank import Part
    from conduit_kv.retrieve.question import Question


@dataclass(frozen=True)
class Ranking:
    """A method's opinion of the candidates.

    Attributes
    ----------
    token : Tensor
        ``[N]`` fp32; higher is chosen sooner.
    unit : Tensor
        ``[U]`` fp32, of each image or frame group.
    """

    token: Tensor
    unit: Tensor

    @property
    def order(self) -> list[int]:
        """Units, best first; ties go to the lower index."""
        return highest(self.unit, len(self.unit)).tolist()


@dataclass(frozen=True)
class RetrieveMethod(Method):
    """Base of the retrieve methods.

    Parameters
    ----------
    budget : Budget
        Visual tokens that a question sees, of all images together.
    unit : {"image", "token"}
        ``"image"``: whole images (frame groups of a video), best first, and of the last one what
        still fits. ``"token"``: the best tokens, wherever they lie.
    positions : {"contiguous", "kept"}
        ``"contiguous"``: as if what is not seen had never been there; a prompt may then be longer
        than the model's positions. ``"kept"``: those of the whole prompt.
    context : {"template", "none"}
        Prefill an image inside the model's chat template, or bare.
    long : {"error", "allow", "scale"}
        What is seen at more positions than the model has: an error, run as it is, or with all
        positions scaled into the model's.
    """

    stage: ClassVar[str] = "retrieve"
    in_decode: ClassVar[str] = "the answer sees what its question chose"
    per_layer: ClassVar[bool] = False
    """Whether every layer chooses for itself, with the question as it is there."""
    per_step: ClassVar[bool] = False
    """Whether every step chooses anew, from pages of all tokens."""

    budget: Budget = field(default=Budget(1.0))
    unit: Literal["image", "token"] = "image"
    positions: Literal["contiguous", "kept"] = "contiguous"
    context: Literal["template", "none"] = "template"
    long: Literal["error", "allow", "scale"] = "error"

    @property
    def is_identity(self) -> bool:
        return self.budget.is_everything

    def check_beside(self, others: Sequence[Method]) -> None:
        for other in [] if self.is_identity else others:
            if isinstance(other, HoldMethod):
                try:
                    other.check_entries()
                except PlanError as error:
                    raise PlanError(f"beside {self.name}, {error}") from None
            elif not other.is_identity:
                raise PlanError(
                    f"{self.name} runs the text anew over what each question chooses, and "
                    f"{other.name} acts on tokens that it would not find again: take one of them"
                )

    def count(self, candidates: int, bytes_per_token: float) -> int:
        """How many of ``candidates`` visual tokens a question sees.

        Parameters
        ----------
        bytes_per_token : float
            K and V of one token in all layers.
        """
        return min(candidates, max(1, self.budget.total([candidates], bytes_per_token or 1.0)))

    def reads(self, layers: int, text_model: nn.Module) -> Sequence[Part] | None:
        """What :meth:`rank` reads of each unit, of a model with so many layers.

        None if a question may read anything of any unit: then whole entries stay in memory.
        """
        return ()

    @abstractmethod
    def rank(self, question: Question) -> Ranking:
        """Score all candidates for a question."""

    def choose(self, question: Question, ranking: Ranking, count: int) -> Tensor:
        """``[count]`` int64 ascending, the candidates that the question sees."""
        if self.unit == "token":
            return highest(ranking.token, count).sort().values
        sizes = [len(tokens) for tokens in question.bank.tokens]
        return take_images(ranking.order, sizes, ranking.token, count)


def unit_means(scores: Tensor, unit: Tensor) -> Tensor:
    """``[U]``, the mean of token scores ``[N]`` in each unit ``[N]``."""
    units = int(unit.max()) + 1 if len(unit) else 0
    total = torch.zeros(units, dtype=scores.dtype).index_add_(0, unit, scores)
    return total / torch.bincount(unit, minlength=units)


def unit_softmax_means(scores: Tensor, unit: Tensor) -> Tensor:
    """``[U]``, the logarithm of the mean exponential of token scores in each unit."""
    units = int(unit.max()) + 1 if len(unit) else 0
    peak = torch.full((units,), -torch.inf).scatter_reduce_(0, unit, scores, "amax")
    spread = unit_means((scores - peak[unit]).exp(), unit)
    return peak + spread.log()


def take_images(
    order: Sequence[int], sizes: Sequence[int], token_scores: Tensor, count: int
) -> Tensor:
    """Candidates of the first units in an order, until ``count`` are chosen.

    The last unit that fits only partly gives its best tokens; ties go to the lower index.

    Parameters
    ----------
    order : sequence of int
        Units, best first.
    sizes : sequence of int
        Candidates of each unit.
    token_scores : Tensor
        ``[N]``, by which the last unit is cut.

    Returns
    -------
    Tensor
        ``[min(count, N)]`` int64 ascending.
    """
    ends = torch.tensor(sizes).cumsum(0).tolist()
    chosen, left = [], count
    for unit in order:
        mine = torch.arange(ends[unit] - sizes[unit], ends[unit])
        if len(mine) > left:
            mine = mine[highest(token_scores[mine], left)]
        chosen.append(mine)
        left -= len(mine)
        if not left:
            break
    return torch.cat(chosen).sort().values if chosen else torch.empty(0, dtype=torch.long)
