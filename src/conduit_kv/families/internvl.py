"""InternVL3: an image is a run of equal tiles, with a view of the whole as the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from conduit_kv.errors import InputError
from conduit_kv.families.base import Family
from conduit_kv.families.binding import pair, runs
from conduit_kv.families.encoder import without_class_token
from conduit_kv.layout import Grid, View


class InternVL(Family):
    """``InternVLForConditionalGeneration`` over any text model.

    Frame 0 of an image is the whole at low resolution (the last tile that the model sees, or the
    only one); frames 1, 2 ... are its tiles in reading order. How many of them make a row is not
    among what the model is given. Each frame of a video is an image of one tile.
    """

    name = "InternVL3"
    model_types = ("internvl",)
    needs_torchvision = True
    opening = 1  # <img>

    def grids(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[list[Grid]]:
        rows, columns = self._tile(model, inputs.get("pixel_values"))
        found = [runs(self.visual_mask(model, row)) for row in ids]
        lengths = [end - start for row in found for start, end in row]
        pixels = inputs.get("pixel_values")
        tiles = sum(lengths) // (rows * columns) if pixels is None else len(pixels)
        if any(n % (rows * columns) for n in lengths) or sum(lengths) != tiles * rows * columns:
            raise InputError(
                f"the prompt has {sum(lengths)} image placeholder tokens in {len(lengths)} "
                f"image(s) but the pixels are {tiles} tile(s) of {rows * columns} tokens: pass "
                "exactly the images that the prompt names, in order"
            )
        return [
            [self._grid((end - start) // (rows * columns), rows, columns) for start, end in row]
            for row in found
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
        start = sum(tiles[:number])
        mine = inputs["pixel_values"][start : start + tiles[number]]
        return [(None, None, {"pixel_values": mine})]

    def tower(self, model: PreTrainedModel) -> nn.Module | None:
        return model.model.vision_tower  # type: ignore[no-any-return]

    def looked_at(
        self, model: PreTrainedModel, received: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor | None:
        patches = without_class_token(model, received)
        side = round(patches.shape[1] ** 0.5)
        folded = model.model.pixel_shuffle(
            patches.view(-1, side, side, 1), scale_factor=model.config.downsample_ratio
        )
        return folded.mean(-1).flatten()  # type: ignore[no-any-return]

    @staticmethod
    def _grid(tiles: int, rows: int, columns: int) -> Grid:
        if tiles == 1:
            return Grid(1, rows, columns)
        order = [*range(1, tiles), 0]
        return Grid(tiles, rows, columns, tuple(View(frame, rows, columns) for frame in order))

    @staticmethod
    def _tile(model: PreTrainedModel, pixels: Any) -> tuple[int, int]:
        vision = model.config.vision_config
        height, width = pair(vision.image_size) if pixels is None else pixels.shape[-2:]
        patch = pair(vision.patch_size)
        ratio = model.config.downsample_ratio
        return int(height // patch[0] * ratio), int(width // patch[1] * ratio)
