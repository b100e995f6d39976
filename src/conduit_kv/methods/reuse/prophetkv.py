"""ProphetKV: refresh what the question attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from conduit_kv.methods.base import register
from conduit_kv.methods.reuse.base import ReuseMethod, ReuseView, mean_of, top


@register
@dataclass(frozen=True)
class ProphetKv(ReuseMethod):
    r"""Attention of the query span alone, as CONDUIT's paper compares with it: reconstructed.

    .. math:: s(t) = \operatorname{mean}_{\ell, q \in Q} \bar A_\ell(q, t)

    over all layers, with neither the values' norm nor a coefficient per image.
    """

    name: ClassVar[str] = "prophetkv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2609.05821"
    basis: ClassVar[str] = "reconstructed"
    scores_layers: ClassVar[bool] = True

    def score(self, view: ReuseView) -> Tensor:
        return view.attention

    def choose(self, scores: Sequence[Tensor], image: Tensor) -> Tensor:
        return top(mean_of(scores), self.count(len(image)))
