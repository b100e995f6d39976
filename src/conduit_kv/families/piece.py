"""One image of a prompt by itself: what must be run to see it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from conduit_kv.layout import Grid


@dataclass(frozen=True)
class Piece:
    """An image, or one frame group of a video, taken out of a prompt.

    Attributes
    ----------
    tokens : Tensor
        ``[N]`` int64 ascending, its placeholders' places in the sequence.
    span : Tensor
        ``[n]`` int64 ids: the marks that open it and all from its first placeholder to its last
        (between an image's tiles there may be marks, which are text).
    opening : int
        How many of ``span`` are opening marks.
    inputs : mapping
        The model's arguments for this image alone (``pixel_values``, ``image_grid_thw`` ...).
    image : int
        Which image of the sequence it is, or is a part of.
    grid : Grid
    """

    tokens: Tensor
    span: Tensor
    opening: int
    inputs: Mapping[str, Any]
    image: int
    grid: Grid

    def __len__(self) -> int:
        return int(self.tokens.shape[0])
