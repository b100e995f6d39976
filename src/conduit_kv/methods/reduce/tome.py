"""ToMe: merge the most similar pairs of tokens until few enough are left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.methods.base import register
from conduit_kv.methods.reduce.base import Picked, ReduceMethod, likeness
from conduit_kv.ranks import highest
from conduit_kv.view import StepView


@register
@dataclass(frozen=True)
class ToMe(ReduceMethod):
    """Bipartite soft matching: even tokens look for the most similar odd one, and the most similar
    pairs merge into it, weighted by how many tokens each stands for; repeated until the budget is
    met, at most half of the tokens a round.

    The published method merges in every layer of the image encoder, by its keys. Here it acts once,
    on the embeddings that reach the language model.
    """

    name: ClassVar[str] = "tome"
    paper: ClassVar[str] = "https://arxiv.org/abs/2210.09461"
    basis: ClassVar[str] = "reconstructed"

    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        states = view.hidden[places.to(view.hidden.device)].float()
        left = torch.arange(len(places))
        size = torch.ones(len(places), device=states.device)
        while len(left) > max(count, 1):
            even, odd = torch.arange(0, len(left), 2), torch.arange(1, len(left), 2)
            best, partner = likeness(states)[even][:, odd].max(1)
            pairs = min(len(left) - count, len(odd))
            order = highest(best, pairs)
            gone, into = even[order], odd[partner.cpu()[order]]
            states = states * size[:, None]
            states.index_add_(0, into.to(states.device), states[gone.to(states.device)])
            size = size.index_add(0, into.to(size.device), size[gone.to(size.device)])
            keep = torch.ones(len(left), dtype=torch.bool)
            keep[gone] = False
            states = (states / size[:, None])[keep.to(states.device)]
            left, size = left[keep], size[keep.to(size.device)]
        return left[:count], states[:count]
