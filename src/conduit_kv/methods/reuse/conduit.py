"""CONDUIT: refresh what writes most into the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.reuse.base import ReuseMethod, ReuseView, mean_of, top


@register
@dataclass(frozen=True)
class Conduit(ReuseMethod):
    r"""Residual-stream restoration (arXiv 2609.05821): known.

    The images of a prompt are there as K/V that never saw the prompt. Stage 1 runs the text over
    them. With :math:`Q` the query span (the text after the last image), :math:`\bar A_\ell` the
    attention of layer :math:`\ell` averaged over its heads and :math:`V_\ell(t)` a token's values,
    all KV heads together,

    .. math::
        s(t) = \operatorname{mean}_{\ell} \;
            \Big( \frac{1}{|Q|} \sum_{q \in Q} \bar A_\ell(q, t) \Big)\, \lVert V_\ell(t) \rVert_2

    An image that draws more than the others counts for more: with :math:`m_j` the mean score of
    image :math:`j` and :math:`\bar m` the mean of these,

    .. math:: c_j = 1 + \beta\,(m_j / \bar m - 1)

    Stage 2 computes the :math:`\lceil rN \rceil` tokens of highest :math:`c_j\, s(t)`, over all
    images, and the query span again; they see everything and overwrite their K/V in this request.

    Parameters
    ----------
    layers : {"auto", "all", "middle"}
        Layers that are averaged over; ``"middle"`` is the middle fifth. By default all of them for
        several images and the middle fifth for a single one.
    beta : float
        How much an image's mean score counts; no effect on a single image.
    """

    name: ClassVar[str] = "conduit"
    paper: ClassVar[str] = "https://arxiv.org/abs/2609.05821"
    scores_layers: ClassVar[bool] = True

    layers: Literal["auto", "all", "middle"] = "auto"
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 0:
            raise PlanError(f"{self.name}: beta={self.beta:g} is negative: take 0 or more")

    def listens_to(self, layer: int, n_layers: int, images: int) -> bool:
        if self.layers == "all" or (self.layers == "auto" and images > 1):
            return True
        first = 2 * n_layers // 5
        return first <= layer < max(first + 1, 3 * n_layers // 5)

    def score(self, view: ReuseView) -> Tensor:
        return view.attention * view.value_norms.to(view.attention.device)

    def choose(self, scores: Sequence[Tensor], image: Tensor) -> Tensor:
        score = mean_of(scores)
        numbers = image.unique().tolist()
        means = torch.stack([score[image == number].mean() for number in numbers])
        weighted = score.clone()
        if len(numbers) > 1 and float(means.mean()) > 0:
            for number, mean in zip(numbers, means, strict=True):
                weighted[image == number] *= 1 + self.beta * (mean / means.mean() - 1)
        return top(weighted, self.count(len(image)))
