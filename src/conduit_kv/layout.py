"""Where each image, frame and text span lies in a sequence.

A layout describes ONE sequence without its padding: token ``i`` is the ``i``-th real token that the
model has seen. Everything else in the package speaks of tokens by this index, so that padding and
batching are solved where a batch is taken apart, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conduit_kv.errors import InputError


@dataclass(frozen=True)
class View:
    """A run of an image's tokens: one frame, or a part of it.

    Attributes
    ----------
    frame : int
        The frame that it belongs to.
    rows, columns : int
        Its shape in tokens.
    row : int
        The frame's row at which it begins.
    tile_rows, tile_columns : int
        Shape of the tiles that it is cut into, if the model sees the tokens tile after tile;
        0 if it sees them row after row.
    """

    frame: int
    rows: int
    columns: int
    row: int = 0
    tile_rows: int = 0
    tile_columns: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.columns

    def cells(self) -> Tensor:
        """``[3, tokens]`` int64: frame, row and column of each token, in the model's order."""
        height, width = self.tile_rows or self.rows, self.tile_columns or self.columns
        tiles = torch.arange(self.tokens).view(
            self.rows // height, height, self.columns // width, width
        )
        order = tiles.transpose(1, 2).reshape(-1)
        return torch.stack(
            [
                torch.full_like(order, self.frame),
                order // self.columns + self.row,
                order % self.columns,
            ]
        )


@dataclass(frozen=True)
class Grid:
    """Shape of one image (or video) in visual tokens.

    Attributes
    ----------
    frames, rows, columns : int
        ``frames`` is 1 for an image. A family that appends one newline token to each row counts it
        as a further column. A family that cuts an image into tiles has two frames: 0 is the whole
        image at low resolution, 1 the tiles laid together.
    views : tuple of View
        Where the tokens are not simply ``frames * rows * columns``: the runs of tokens in the
        model's order; ``frames``, ``rows`` and ``columns`` then bound every token's place.
    """

    frames: int
    rows: int
    columns: int
    views: tuple[View, ...] = ()

    @property
    def tokens(self) -> int:
        """Placeholder tokens of the image."""
        if self.views:
            return sum(view.tokens for view in self.views)
        return self.frames * self.rows * self.columns

    def cells(self) -> Tensor:
        """``[3, tokens]`` int64: frame, row and column of each token, in the model's order."""
        if self.views:
            return torch.cat([view.cells() for view in self.views], dim=1)
        cell = torch.arange(self.tokens)
        return torch.stack(
            [
                cell // (self.rows * self.columns),
                cell // self.columns % self.rows,
                cell % self.columns,
            ]
        )


@dataclass(frozen=True)
class Layout:
    """Which tokens of a sequence are text, and where the others lie in which image.

    Attributes
    ----------
    places : Tensor
        ``[4, T]`` int64: image, frame, row and column of each token; -1 for text.
    grids : tuple of Grid
        One per image.
    """

    places: Tensor
    grids: tuple[Grid, ...] = ()

    def __len__(self) -> int:
        return int(self.places.shape[1])

    @property
    def image(self) -> Tensor:
        """``[T]`` int64, the image that a token belongs to, in order of appearance."""
        return self.places[0]

    @property
    def frame(self) -> Tensor:
        """``[T]`` int64, the token's place in its image's grid, as are row and column."""
        return self.places[1]

    @property
    def row(self) -> Tensor:
        """``[T]`` int64."""
        return self.places[2]

    @property
    def column(self) -> Tensor:
        """``[T]`` int64."""
        return self.places[3]

    @property
    def visual(self) -> Tensor:
        """``[T]`` bool, True for the visual tokens."""
        return self.image >= 0

    @property
    def text(self) -> Tensor:
        """``[T]`` bool, True for the text tokens."""
        return self.image < 0

    @property
    def first_visual(self) -> int:
        """Index of the first visual token; the length of the sequence if there is none."""
        hits = torch.nonzero(self.visual)
        return int(hits[0]) if len(hits) else len(self)

    def select(self, tokens: Tensor) -> Layout:
        """The layout of some of the tokens, ``tokens`` ``[S]`` int64, in that order."""
        return Layout(self.places.index_select(1, tokens), self.grids)

    def first_of(self, visual: int) -> Layout:
        """All text, and the first ``visual`` visual tokens: enough to count with."""
        return self.select(torch.nonzero(self.text | (self.visual.cumsum(0) <= visual)).flatten())

    def extend(self, later: Layout) -> Layout:
        """This sequence followed by ``later``, whose images are numbered on."""
        shifted = later.places.clone()
        shifted[0, later.visual] += len(self.grids)
        return Layout(torch.cat([self.places, shifted], 1), self.grids + later.grids)

    def crop(self, length: int) -> Layout:
        """The first ``length`` tokens; images that begin later are forgotten."""
        kept = self.image[:length]
        images = int(kept.max()) + 1 if length and bool((kept >= 0).any()) else 0
        return Layout(self.places[:, :length], self.grids[:images])

    def counts(self, tokens: Tensor | None = None) -> list[int]:
        """Visual tokens per image, of all tokens or of ``tokens`` ``[S]`` only."""
        image = self.image if tokens is None else self.image[tokens]
        return torch.bincount(image[image >= 0], minlength=len(self.grids)).tolist()

    @staticmethod
    def text_only(length: int) -> Layout:
        """A sequence of ``length`` text tokens."""
        return Layout(torch.full((4, length), -1))

    @staticmethod
    def of(visual: Tensor, grids: Sequence[Grid]) -> Layout:
        """Lay ``grids`` out, in order, over the True places of ``visual``.

        Parameters
        ----------
        visual : Tensor
            ``[T]`` bool, the placeholder tokens of one sequence without padding.
        grids : sequence of Grid
            One per image, in order of appearance.

        Raises
        ------
        InputError
            If the placeholders and the images disagree in number.
        """
        places = torch.nonzero(visual.cpu()).flatten()
        wanted = sum(grid.tokens for grid in grids)
        if len(places) != wanted:
            raise InputError(
                f"the prompt has {len(places)} visual placeholder tokens but its {len(grids)} "
                f"image(s) give {wanted}: pass exactly the images that the prompt names, in order"
            )
        found = torch.full((4, len(visual)), -1)
        start = 0
        for number, grid in enumerate(grids):
            span = places[start : start + grid.tokens]
            start += grid.tokens
            found[0, span] = number
            found[1:, span] = grid.cells()
        return Layout(found, tuple(grids))
