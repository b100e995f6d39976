"""Quest: every step reads the pages whose largest possible product is largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod

if TYPE_CHECKING:
    from conduit_kv.retrieve.question import Question


@register
@dataclass(frozen=True)
class Quest(RetrieveMethod):
    r"""Query-aware sparsity (arXiv 2406.10774): known.

    All keys stay, RoPE applied, in pages of neighbouring visual tokens with their elementwise
    minimum :math:`m_p` and maximum :math:`M_p`. In every layer and step a KV head reads the pages
    with the largest

    .. math:: u_p = \max_{h, q} \sum_c \max(q_c m_{pc}, q_c M_{pc})

    over its query heads :math:`h` and the step's rows :math:`q`: the newest token in decoding, the
    question's in the turn that asks it (the published code reads everything in that turn). The
    text is always read. Everything has to be in memory, at the positions of the whole prompt.

    Parameters
    ----------
    page : int
        Tokens of a page. The budget is rounded down to whole pages, at least one.
    positions : {"kept"}
    """

    name: ClassVar[str] = "quest"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.10774"
    in_decode: ClassVar[str] = "every step reads other pages"
    per_step: ClassVar[bool] = True

    positions: Literal["contiguous", "kept"] = "kept"
    page: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page < 1:
            raise PlanError(f"{self.name}: page={self.page} holds nothing; take at least 1")
        if self.positions != "kept" or self.unit != "image" or self.long == "scale":
            raise PlanError(
                f"{self.name} reads other pages in every step, so tokens keep their positions and "
                "there is no unit to choose: leave positions, unit and long=scale out"
            )

    def reads(self, layers: int, text_model: nn.Module) -> None:
        return None

    def rank(self, question: Question) -> Ranking:
        # Pages are chosen while attending, by PagedSegment.
        flat = torch.zeros(question.bank.size)
        return Ranking(flat, torch.zeros(len(question.bank)))
