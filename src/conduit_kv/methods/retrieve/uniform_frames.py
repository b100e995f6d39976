"""Uniform frames: every n-th image, whatever is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from conduit_kv.methods.base import register
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod

if TYPE_CHECKING:
    from conduit_kv.retrieve.question import Question


@register
@dataclass(frozen=True)
class UniformFrames(RetrieveMethod):
    r"""Control: the usual way to show a long video to a model.

    Of :math:`U` units those with numbers :math:`\lfloor (j + 1/2) U / m \rfloor`, as many
    (:math:`m`) as the budget holds; the last one may be cut, evenly over its tokens.
    """

    name: ClassVar[str] = "uniform-frames"

    def rank(self, question: Question) -> Ranking:
        return self._ranked(question, 1)

    def _ranked(self, question: Question, taken: int) -> Ranking:
        units = len(question.bank)
        unit = torch.zeros(units)
        unit[((torch.arange(taken) + 0.5) * units / taken).long()] = 1.0
        token = torch.cat([_spread(len(tokens)) for tokens in question.bank.tokens])
        return Ranking(token, unit)

    def choose(self, question: Question, ranking: Ranking, count: int) -> Tensor:
        units = len(question.bank)
        taken = min(units, max(1, -(-count * units // question.bank.size)))
        return super().choose(question, self._ranked(question, taken), count)


def _spread(size: int) -> Tensor:
    """``[size]``: scores by which any number of best tokens lies evenly over all of them."""
    # The bits of the index in reverse: 0, 1/2, 1/4, 3/4 ... of the way.
    bits = max(1, (size - 1).bit_length())
    place = torch.arange(size)
    turned = sum((place >> bit & 1) << (bits - 1 - bit) for bit in range(bits))
    return -torch.as_tensor(turned).float()
