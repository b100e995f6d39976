"""The reduce stage: choose among the image embeddings, or merge them, before the first layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.budget import largest_remainder
from conduit_kv.layout import Layout
from conduit_kv.methods.flow import Chosen, Flops, FlowMethod
from conduit_kv.methods.schedule import Schedule
from conduit_kv.view import StepView

Picked = tuple[Tensor, Tensor | None]
"""``[n]`` int64, which of an image's tokens stay, and ``[n, D]`` fp32, what they become."""

Salience = Literal["distinct", "norm"]
"""What stands in for the class token's attention in the image encoder.

``distinct``: one minus a token's mean cosine with the others of its image. ``norm``: the length of
its embedding. On the built-in model an empty part of a board has longer embeddings than a picture,
so that the norm keeps what is empty, and loses to chance.
"""
SALIENCE = {
    "distinct": "the score is 1 - mean cosine with the image's tokens, not class-token attention",
    "norm": "the score is the norm of the projected tokens, not class-token attention",
}


@dataclass(frozen=True)
class ReduceMethod(FlowMethod):
    """Base of the methods that act before the first layer: once, on what the images were encoded to
    in the language model's input space.

    Each image is reduced by itself, to its part of the budget (largest remainder). Tokens that stay
    keep their positions; the others leave the sequence in every layer, with their deepstack
    features. A token that others are merged into keeps its own deepstack features.
    """

    stage: ClassVar[str] = "reduce"
    in_decode: ClassVar[str] = "decoded tokens run all layers, on what each layer holds"

    def schedule(self, n_layers: int, layout: Layout, flops: Flops) -> Schedule | None:
        visual = int(layout.visual.sum())
        count = max(1, round(self.mean_active(visual)))
        if not visual or count >= visual:
            return None
        return Schedule((0,), (count,), n_layers, visual)

    def choose(self, view: StepView, count: int) -> Chosen:
        places, states, notes = [], [], []
        for mine, share in _per_image(view.layout, count):
            kept, merged = self.pick(view, mine, share)
            order = torch.sort(kept).indices
            places.append(mine[kept[order]])
            if merged is not None:
                states.append(merged[order.to(merged.device)])
        if self.note:
            notes.append(f"{self.name}: {self.note}")
        hidden = torch.cat(states) if states else None
        return Chosen(torch.cat(places), hidden, note=" ".join(notes))

    @property
    def note(self) -> str:
        """What stands in for something that the published method has and a model may not."""
        return ""

    @abstractmethod
    def pick(self, view: StepView, places: Tensor, count: int) -> Picked:
        """Reduce one image.

        Parameters
        ----------
        places : Tensor
            ``[N]`` int64, the image's tokens in the view.
        count : int
            At least 0, at most ``N``.
        """


def _per_image(layout: Layout, count: int) -> Iterator[tuple[Tensor, int]]:
    visual = torch.nonzero(layout.visual).flatten()
    owner = layout.image[visual]
    sizes = torch.bincount(owner, minlength=len(layout.grids)).tolist()
    shares = largest_remainder([size * count / len(visual) for size in sizes], count)
    for image, share in enumerate(shares):
        if sizes[image]:
            yield visual[owner == image], share


def likeness(states: Tensor) -> Tensor:
    """``[N, N]`` fp32: cosines of embeddings ``[N, D]``."""
    unit = torch.nn.functional.normalize(states.float(), dim=-1)
    return unit @ unit.T


def salience(states: Tensor, by: Salience) -> Tensor:
    """``[N]`` fp32 scores of an image's embeddings ``[N, D]``."""
    return states.norm(dim=-1) if by == "norm" else 1 - likeness(states).mean(1)
