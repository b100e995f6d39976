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

Salience = Literal["encoder", "distinct", "norm"]
"""What an image's tokens are ranked by.

``encoder``: attention in the image encoder, in the layer whose states the language model gets: of
its class token (CLIP, InternViT) or, without one, the mean over all patches (SigLIP). Where the
encoder has no attention that can be read (the built-in model's is convolutional; Qwen's), or the
images were not encoded in this call, it is ``distinct``. ``distinct``: one minus a token's mean
cosine with the others of its image. ``norm``: the length of its embedding. On the built-in model an
empty part of a board has longer embeddings than a picture, so that the norm keeps what is empty,
and loses to chance.
"""


@dataclass(frozen=True)
class Salient:
    """What methods have in common that rank tokens by how salient they are, not by the question.

    Parameters
    ----------
    score : {"encoder", "distinct", "norm"}
        See :data:`Salience`.
    """

    score: Salience = "encoder"

    @property
    def looks(self) -> bool:
        """Whether the image encoder's attention is wanted."""
        return self.score == "encoder"

    def salience(self, view: StepView, places: Tensor) -> Tensor:
        """``[N]`` fp32 on the CPU, scores of an image's tokens at ``places`` ``[N]`` of a view."""
        if self.looks and view.looked_at is not None:
            return view.looked_at.scores[places]
        states = view.hidden[places.to(view.hidden.device)].float()
        found = states.norm(dim=-1) if self.score == "norm" else 1 - likeness(states).mean(1)
        return found.cpu()

    def note(self, view: StepView) -> str:
        """What the score was, for the report."""
        if self.looks and view.looked_at is not None:
            return f"the score is {view.looked_at.by} of the image encoder"
        by = "the norm of the embeddings" if self.score == "norm" else (
            "1 - mean cosine with the image's tokens"
        )  # fmt: skip
        return f"the score is {by}, not attention of the image encoder"


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
        note = self.note(view)
        if note:
            notes.append(f"{self.name}: {note}")
        hidden = torch.cat(states) if states else None
        return Chosen(torch.cat(places), hidden, note=" ".join(notes))

    def note(self, view: StepView) -> str:
        """What the report should say of how tokens were ranked."""
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
