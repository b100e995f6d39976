"""Random selection: the control that every retrieve method must beat."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from conduit_kv.methods.base import register
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod

if TYPE_CHECKING:
    from conduit_kv.retrieve.question import Question


@register
@dataclass(frozen=True)
class RandomSelect(RetrieveMethod):
    """Control: images, or tokens, drawn evenly; another draw for another question.

    Parameters
    ----------
    seed : int
    """

    name: ClassVar[str] = "random-select"

    seed: int = 0

    def rank(self, question: Question) -> Ranking:
        asked = question.rows.float().cpu().contiguous().numpy().tobytes()
        digest = hashlib.sha256(asked + str((self.seed, len(question.layout))).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        token = torch.rand(question.bank.size, generator=generator)
        return Ranking(token, torch.rand(len(question.bank), generator=generator))
