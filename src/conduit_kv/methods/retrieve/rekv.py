"""ReKV: every layer retrieves the frames whose keys point where its question does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod

if TYPE_CHECKING:
    from conduit_kv.retrieve.question import Question


@register
@dataclass(frozen=True)
class ReKv(RetrieveMethod):
    r"""In-context retrieval for streaming video (arXiv 2503.00540): known.

    In each layer, before it attends, with RoPE taken off and the query heads of a KV head
    :math:`g(h)` laid side by side,

    .. math::
        s_u = \cos\Big( \big[\operatorname{mean}_{q \in Q} q_h\big]_h,
                        \big[\operatorname{mean}_{i \in u} k_{g(h), i}\big]_h \Big)

    and the layer's rows attend to its own best frames and the text. Layers choose differently, so
    the frames of all layers take the same places: a block between the text before the question and
    the question, as the published video prompt has it. Tokens within a frame rank by the same
    cosine of their own keys.

    The first layer's choice is what ``rank`` gives; the report ranks by the mean over layers.
    """

    name: ClassVar[str] = "rekv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2503.00540"
    per_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == "kept" or self.long == "scale":
            raise PlanError(
                f"{self.name} lays every layer's frames in one block: leave positions and "
                "long=scale out"
            )

    def reads(self, layers: int, text_model: nn.Module) -> None:
        return None

    def rank(self, question: Question) -> Ranking:
        return self.rank_layer(question, 0, question.queries(0))

    def rank_layer(self, question: Question, layer: int, queries: Tensor) -> Ranking:
        """The ranking of one layer.

        Parameters
        ----------
        queries : Tensor
            ``[H, Q, d]``, position-free, of the question's rows as they are in this layer.
        """
        asked = queries.float().mean(1)  # [H, d]
        asked_heads = len(asked)
        asked = F.normalize(asked.flatten(), dim=0)
        tokens, units = [], []
        for keys in question.keys(layer):
            group = asked_heads // len(keys)
            heads = keys.float().repeat_interleave(group, 0)  # [H, n, d]
            tokens.append(F.normalize(heads.transpose(0, 1).flatten(1), dim=-1) @ asked)
            units.append(F.normalize(heads.mean(1).flatten(), dim=0) @ asked)
        return Ranking(torch.cat(tokens).cpu(), torch.stack(units).cpu())
