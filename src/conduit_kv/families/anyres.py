"""Images of any resolution as LLaVA-NeXT and LLaVA-OneVision cut them: a view and its tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from conduit_kv.layout import Grid, View


def side_of(model: PreTrainedModel) -> int:
    """Tokens along a side of one tile."""
    vision = model.config.vision_config
    return int(vision.image_size) // int(vision.patch_size)


def mosaic_shape(model: PreTrainedModel, size: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of an image's tiles laid together, without the padding.

    Both steps are Transformers' own functions, so that rounding is theirs.

    Parameters
    ----------
    size : sequence of int
        (height, width) of the image in pixels before processing.
    """
    from transformers.models.llava_next.modeling_llava_next import (
        get_anyres_image_grid_shape,
        unpad_image,
    )

    config: Any = model.config
    rows, columns = get_anyres_image_grid_shape(
        tuple(size), config.image_grid_pinpoints, config.vision_config.image_size
    )
    side = side_of(model)
    padded = torch.empty((1, rows * side, columns * side), device="meta")
    _, height, width = unpad_image(padded, tuple(size)).shape
    return int(height), int(width)


def tiles_of(model: PreTrainedModel, size: Sequence[int]) -> int:
    """Views of an image that the encoder sees, the whole among them; the rest is padding."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

    config: Any = model.config
    return int(
        image_size_to_num_patches(
            tuple(size), config.image_grid_pinpoints, config.vision_config.image_size
        )
    )


def view_and_mosaic(side: int, rows: int, columns: int) -> Grid:
    """The whole image in ``side`` x ``side`` tokens, then its tiles in ``rows`` x ``columns``.

    A newline embedding ends each row of the tiles: they have one column more.
    """
    return Grid(
        frames=2,
        rows=max(side, rows),
        columns=max(side, columns + 1),
        views=(View(0, side, side), View(1, rows, columns + 1)),
    )


def closed_by_newline(frames: int, rows: int, columns: int) -> Grid:
    """Frames of ``rows`` x ``columns`` tokens and a single newline after the last.

    The newline stands in a row of its own, below the last frame.
    """
    views = [View(frame, rows, columns) for frame in range(frames)]
    return Grid(frames, rows + 1, columns, (*views, View(frames - 1, 1, 1, row=rows)))


def sizes_of(image_sizes: Any) -> list[list[int]]:
    """``image_sizes`` ``[N, 2]`` to N lists (height, width)."""
    if image_sizes is None:
        return []
    rows: list[list[int]] = torch.as_tensor(image_sizes).reshape(-1, 2).tolist()
    return rows
