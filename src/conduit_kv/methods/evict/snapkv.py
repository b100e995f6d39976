"""SnapKV: what the last queries of the prompt attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class SnapKv(EvictMethod):
    r"""Observation window (arXiv 2404.14469): known.

    With :math:`W` the last ``window`` rows, :math:`h` the query heads of KV head :math:`g` and
    columns :math:`j` before the window,

    .. math::
        s^g_j = \operatorname{mean}_{h} \operatorname{pool}_j
            \Big( \frac{1}{|W|} \sum_{i \in W} A^h_{ij} \Big)

    Each KV head keeps its own tokens. The window is kept before anything else; where the budget is
    smaller than the window (short prompts at a few per cent), what is kept is its newest tokens, as
    the published rule has it: take ``window=8`` there. Mean over the window, zero-padded mean
    pooling and mean over the heads of a group are kvpress' choices. Text and visual tokens are
    alike. A turn with fewer than ``window`` tokens observes with what it has.

    Nothing is evicted in decoding.

    Parameters
    ----------
    window : int
        Rows that observe.
    kernel : int
        Width of the pooling over neighbouring candidates; odd, 1 is none.
    pool : {"mean", "max"}
    """

    name: ClassVar[str] = "snapkv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"

    window: int = 32
    kernel: int = 5
    pool: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise PlanError(f"{self.name}: window={self.window} observes nothing; take at least 1")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise PlanError(f"{self.name}: kernel={self.kernel} has no middle; take an odd number")

    def score(self, view: LayerView) -> Scores:
        window = view.rows[-self.window :]
        before = view.size - len(window)
        received = view.keys.new_zeros((view.heads, view.size), dtype=torch.float32)
        for _, attention in view.attention_blocks(window):
            received += attention.sum(1)
        pooled = self._pooled(received[:, :before] / len(window))
        score = torch.arange(view.size).float().repeat(view.kv_heads, 1)
        score[:, :before] = view.group_mean(pooled).cpu()
        tier = (torch.arange(view.size) >= before).to(torch.int8)
        return Scores(score, tier)

    def _pooled(self, mean: Tensor) -> Tensor:
        """``[H, S']`` pooled over its neighbours."""
        if not mean.shape[1] or self.kernel == 1:
            return mean
        pool = F.avg_pool1d if self.pool == "mean" else F.max_pool1d
        return pool(mean[None], self.kernel, stride=1, padding=self.kernel // 2)[0]
