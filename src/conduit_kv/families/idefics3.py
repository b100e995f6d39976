"""Idefics3 and SmolVLM: an image is tiles with marks of text between, and a view of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from conduit_kv.errors import InputError
from conduit_kv.families.base import Family
from conduit_kv.families.binding import pair, runs
from conduit_kv.layout import Grid, View


class Idefics3(Family):
    """``Idefics3ForConditionalGeneration``.

    The prompt of an image is, for each of its rows, ``<fake><row_1_col_1>`` and the tile's
    placeholders, tile after tile, then a newline; at last ``<fake><global-img>``, the placeholders
    of the whole image at low resolution, and ``<fake>``. The marks are text. Which tiles make an
    image, and how many stand in a row, is read from them, so that no tokenizer is needed.

    Frame 0 of an image is the whole (the last that the model sees), frame 1 its tiles laid
    together. Each frame of a video is an image without tiles.
    """

    name = "Idefics3"
    model_types = ("idefics3",)
    nested_images = True
    opening = 2  # <fake> and the first tile's name

    def text_model(self, model: PreTrainedModel) -> nn.Module:
        return model.model.text_model  # type: ignore[no-any-return]

    def tower(self, model: PreTrainedModel) -> nn.Module | None:
        return model.model.vision_model  # type: ignore[no-any-return]

    def looked_at(
        self, model: PreTrainedModel, received: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor | None:
        connector = model.model.connector
        folded = connector.pixel_shuffle(received[..., None], connector.scale_factor)
        return folded.mean(-1).flatten()  # type: ignore[no-any-return]

    def grids(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[list[Grid]]:
        pixels = inputs.get("pixel_values")
        rows, columns = self._tile(model, pixels)
        found = [runs(self.visual_mask(model, row)) for row in ids]
        lengths = [end - start for row in found for start, end in row]
        # Sequences with fewer tiles are filled up with zeros, as the model knows too.
        tiles = len(lengths) if pixels is None else int((pixels != 0).flatten(2).any(-1).sum())
        if any(n != rows * columns for n in lengths) or len(lengths) != tiles:
            raise InputError(
                f"the prompt has {sum(lengths)} image placeholder tokens in {len(lengths)} "
                f"tile(s) but the pixels are {tiles} tile(s) of {rows * columns} tokens: pass "
                "exactly the images that the prompt names, in order"
            )
        return [
            [_grid(shape, rows, columns) for shape in _images(row.tolist(), places)]
            for row, places in zip(ids, found, strict=True)
        ]

    def alone(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, Any],
        kind: int,
        number: int,
        grids: Sequence[Grid],
    ) -> list[tuple[int | None, Grid | None, dict[str, Any]]]:
        rows, columns = self._tile(model, inputs.get("pixel_values"))
        tiles = [grid.tokens // (rows * columns) for grid in grids]
        mine = slice(sum(tiles[:number]), sum(tiles[: number + 1]))
        arguments = {
            name: inputs[name][:, mine]
            for name in ("pixel_values", "pixel_attention_mask")
            if inputs.get(name) is not None
        }
        return [(None, None, arguments)]

    @staticmethod
    def _tile(model: PreTrainedModel, pixels: Any) -> tuple[int, int]:
        vision, scale = model.config.vision_config, model.config.scale_factor
        height, width = pair(vision.image_size) if pixels is None else pixels.shape[-2:]
        patch = pair(vision.patch_size)
        return height // patch[0] // scale, width // patch[1] // scale


class SmolVLM(Idefics3):
    """``SmolVLMForConditionalGeneration``: laid out as Idefics3."""

    name = "SmolVLM"
    model_types = ("smolvlm",)
    nested_videos = True
    needs_torchvision = True


def _images(ids: list[int], places: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Tiles per row of each image of one sequence; an image without tiles has no rows.

    Parameters
    ----------
    ids : list of int
        ``[T]``.
    places : sequence of (int, int)
        Start and end of each tile's placeholders.
    """
    if not places:
        return []
    last = places[-1][1]
    fake = ids[last] if last < len(ids) else None
    previous = 0
    marks: list[list[int]] = []  # what stands between the last <fake> and a tile
    leads: list[list[int]] = []  # what stands between a tile and the one before
    for start, end in places:
        lead = ids[previous:start]
        after = len(lead) - lead[::-1].index(fake) if fake in lead else len(lead)
        leads.append(lead)
        marks.append(lead[after:])
        previous = end
    images: list[list[int]] = []
    shape: list[int] = []
    for mark, lead in zip(marks, leads, strict=True):
        if mark == marks[-1]:  # the view of the whole closes an image
            images.append(shape)
            shape = []
        elif shape and lead[:1] == [fake]:  # nothing between it and the tile before
            shape[-1] += 1
        else:
            shape.append(1)
    return images


def _grid(shape: list[int], rows: int, columns: int) -> Grid:
    whole = View(0, rows, columns)
    if not shape:
        return Grid(1, rows, columns)
    if len(set(shape)) > 1:  # rows of unequal length: tile by tile
        tiles = [View(1 + n, rows, columns) for n in range(sum(shape))]
        return Grid(1 + len(tiles), rows, columns, (*tiles, whole))
    height, width = len(shape) * rows, shape[0] * columns
    return Grid(2, height, width, (View(1, height, width, 0, rows, columns), whole))
