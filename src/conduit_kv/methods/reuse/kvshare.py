"""KVShare: refresh what is attended to and has changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from conduit_kv.methods.base import register
from conduit_kv.methods.reuse.base import ReuseMethod, ReuseView, mean_of, top


@register
@dataclass(frozen=True)
class KvShare(ReuseMethod):
    r"""Attention times the change of the values (arXiv 2503.16525): reconstructed.

    .. math::
        s(t) = \operatorname{mean}_{\ell \ge 1, q \in Q} \bar A_\ell(q, t)\;
            \lVert V'_1(t) - V_1(t) \rVert_1

    :math:`V'_1` are the values of layer 1 when layer 0 has run again in the new prompt: those of
    layer 0 itself depend on no other token.
    """

    name: ClassVar[str] = "kvshare"
    paper: ClassVar[str] = "https://arxiv.org/abs/2503.16525"
    basis: ClassVar[str] = "reconstructed"
    scores_layers: ClassVar[bool] = True
    needs_deviation: ClassVar[bool] = True

    def listens_to(self, layer: int, n_layers: int, images: int) -> bool:
        return layer > 0 or n_layers == 1

    def score(self, view: ReuseView) -> Tensor:
        if view.deviation is None:  # a model of one layer: no values ever change
            return view.attention
        return view.attention * view.deviation.float().abs().sum((0, 2)).to(view.attention.device)

    def choose(self, scores: Sequence[Tensor], image: Tensor) -> Tensor:
        return top(mean_of(scores), self.count(len(image)))
