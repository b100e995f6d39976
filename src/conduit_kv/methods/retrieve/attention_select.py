"""Attention-score selection: what the question attends to in one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod, unit_means

if TYPE_CHECKING:
    from conduit_kv.retrieve.bank import Part
    from conduit_kv.retrieve.question import Question


@register
@dataclass(frozen=True)
class AttentionSelect(RetrieveMethod):
    r"""Raw attention as the score, the usual baseline of learned retrieval.

    In one layer, with the question's rows :math:`Q`, heads :math:`h` and all candidates' keys and
    the text's,

    .. math:: s_i = \operatorname{mean}_{h,\, q \in Q} A^h_{qi}

    An image's score is the mean of its tokens'. The question's states are those over text alone,
    and every image is asked as if it stood alone before the question, so that no position is one
    that the model has not seen.

    Parameters
    ----------
    depth : float
        The scored layer as a share of the depth; layers before it are run.
    """

    name: ClassVar[str] = "attention-select"
    paper: ClassVar[str] = "https://arxiv.org/abs/2607.28627"
    basis: ClassVar[str] = "reconstructed"

    depth: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.depth < 1:
            raise PlanError(f"{self.name}: depth={self.depth:g} is not a share in [0, 1)")

    def reads(self, layers: int, text_model: nn.Module) -> Sequence[Part]:
        return [("keys", int(self.depth * layers))]

    def rank(self, question: Question) -> Ranking:
        layer = int(self.depth * question.n_layers)
        queries, text = question.rotated(layer)
        kv_heads, total, width = text.shape
        scale = float(getattr(question.family.attention(question.layer(layer)), "scaling",
                              width**-0.5))  # fmt: skip
        rows = queries.float().unflatten(0, (kv_heads, -1))  # [G, H/G, Q, d]

        def products(keys: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = rows @ keys.float()[:, None].transpose(-1, -2) * scale
            return found

        logits = [products(keys) for keys in question.keys(layer, turned=True)]
        prefix = total - rows.shape[2]
        words = products(text)
        hidden = torch.arange(total) > torch.arange(prefix, total)[:, None]
        words = words.masked_fill(hidden.to(words.device), -torch.inf)
        weights = torch.cat([words, *logits], dim=-1).softmax(-1)[..., total:]
        token = weights.mean((0, 1, 2)).cpu()
        return Ranking(token, unit_means(token, question.unit))
