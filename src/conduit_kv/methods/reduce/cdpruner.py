"""CDPruner: tokens that are unlike each other, and speak to the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.methods.base import register
from conduit_kv.methods.reduce.base import Picked, ReduceMethod, likeness
from conduit_kv.view import StepView

_TINY = 1e-6


@register
@dataclass(frozen=True)
class CdPruner(ReduceMethod):
    r"""Greedy MAP of a determinantal point process, conditioned on the question.

    .. math:: L = \mathrm{diag}(r) \, S \, \mathrm{diag}(r), \quad S_{ij} = \cos(x_i, x_j)

    with relevance :math:`r_i` the cosine of token and mean text embedding, scaled over the image to
    (0, 1]. The published method takes relevance from CLIP's text encoder where there is one; here
    both lie in the language model's input space. Each step takes the token that adds most to the
    log-determinant, by an incremental Cholesky factor: O(N n) memory, O(N n^2) time.
    """

    name: ClassVar[str] = "cdpruner"
    paper: ClassVar[str] = "https://arxiv.org/abs/2506.10967"

    def note(self, view: StepView) -> str:
        return "relevance is the cosine of projected token and mean text embedding"

    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        states = view.hidden[places.to(view.hidden.device)].float()
        relevance = torch.ones(len(places))
        if bool(view.layout.text.any()):
            text = view.hidden[view.layout.text.to(view.hidden.device)].float().mean(0)
            relevance = F.cosine_similarity(states, text[None], dim=-1).cpu()
            low, high = relevance.min(), relevance.max()
            relevance = (relevance - low + _TINY) / (high - low + _TINY)
        kernel = relevance[:, None] * likeness(states).cpu() * relevance[None]
        return greedy_map(kernel, count), None


def greedy_map(kernel: Tensor, count: int) -> Tensor:
    """``[count]`` int64: greedy maximisation of the log-determinant (arXiv 1709.05135).

    Parameters
    ----------
    kernel : Tensor
        ``[N, N]`` fp32, positive semidefinite. Where what is left adds nothing any more, ties go to
        the lower index.
    """
    gain = kernel.diagonal().double().clone()
    kernel = kernel.double()
    factor = torch.zeros((count, len(kernel)), dtype=torch.double)
    kept: list[int] = []
    for step in range(count):
        chosen = int(gain.argmax())
        kept.append(chosen)
        root = gain[chosen].clamp(min=1e-12).sqrt()
        row = (kernel[chosen] - factor[:step, chosen] @ factor[:step]) / root
        factor[step] = row
        gain = (gain - row.square()).clamp(min=0.0)
        gain[kept] = -torch.inf
    return torch.tensor(kept, dtype=torch.long)
