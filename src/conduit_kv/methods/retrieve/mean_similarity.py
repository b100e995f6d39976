"""Mean-pooled similarity: the image that looks most like the question's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from conduit_kv.methods.base import register
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod

if TYPE_CHECKING:
    from conduit_kv.retrieve.bank import Part
    from conduit_kv.retrieve.question import Question


@register
@dataclass(frozen=True)
class MeanSimilarity(RetrieveMethod):
    r"""Control: cosine in the language model's input space, no layer is run.

    With :math:`t` the mean embedding of the question's tokens and :math:`x_i` the image tokens as
    the encoder gave them,

    .. math:: s_i = \cos(t, x_i), \qquad s_u = \cos(t, \operatorname{mean}_{i \in u} x_i)
    """

    name: ClassVar[str] = "mean-similarity"

    def reads(self, layers: int, text_model: nn.Module) -> Sequence[Part]:
        return [("features", None)]

    def rank(self, question: Question) -> Ranking:
        text = F.normalize(question.rows.float().mean(0), dim=0)
        tokens, units = [], []
        for features in question.features():
            features = features.float().to(text.device)
            tokens.append(F.normalize(features, dim=-1) @ text)
            units.append(F.normalize(features.mean(0), dim=0) @ text)
        return Ranking(torch.cat(tokens).cpu(), torch.stack(units).cpu())
