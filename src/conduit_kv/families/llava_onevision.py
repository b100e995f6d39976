"""LLaVA-OneVision: tiles for a lone image, one view for each of several, pooled video frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conduit_kv.families.anyres import (
    closed_by_newline,
    mosaic_shape,
    side_of,
    sizes_of,
    tiles_of,
    view_and_mosaic,
)
from conduit_kv.families.base import Family
from conduit_kv.families.binding import IMAGE, VIDEO, bind
from conduit_kv.families.encoder import without_class_token
from conduit_kv.layout import Grid


class LlavaOnevision(Family):
    """``LlavaOnevisionForConditionalGeneration``.

    A lone image of a sequence is laid out as in LLaVA-NeXT, shrunk if its tiles are many. One of
    several, if the processor was told which images go together, is a single view and a newline. A
    video is its frames, pooled two by two, and one newline.
    """

    name = "LLaVA-OneVision"
    model_types = ("llava_onevision",)
    nested_images = True  # the lists say which images go together
    needs_torchvision = True

    def grids(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[list[Grid]]:
        kinds = [self.kinds(model, row) for row in ids]
        side = side_of(model)
        sizes = sizes_of(inputs.get("image_sizes"))
        together = inputs.get("batch_num_images")
        if together is None:
            alone = [True] * len(sizes)
        else:
            counts = torch.as_tensor(together).flatten().tolist()
            alone = [count == 1 for count in counts for _ in range(count)]
        images = [
            self._tiled(model, size) if tiled else closed_by_newline(1, side, side)
            for size, tiled in zip(sizes, alone, strict=False)  # one of several, alone
        ]
        videos: list[Grid] = []
        films = inputs.get("pixel_values_videos")
        if films is not None:
            pooled = math.ceil(side / 2)
            videos = [closed_by_newline(int(film.shape[0]), pooled, pooled) for film in films]
        elif bool(any((row == VIDEO).any() for row in kinds)):
            videos = self._videos_from_ids(kinds, math.ceil(side / 2))
        return bind(kinds, {IMAGE: images, VIDEO: videos}, complete=self.has_pixels(kinds, inputs))

    def alone(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, Any],
        kind: int,
        number: int,
        grids: Sequence[Grid],
    ) -> list[tuple[int | None, Grid | None, dict[str, Any]]]:
        one = slice(number, number + 1)
        if kind == VIDEO:
            films = {"pixel_values_videos": inputs["pixel_values_videos"][one]}
            return [(None, None, films)]
        sizes = torch.as_tensor(inputs["image_sizes"]).reshape(-1, 2)[one]
        together = inputs.get("batch_num_images")
        arguments: dict[str, Any] = {"image_sizes": sizes}
        tiles = tiles_of(model, sizes[0].tolist())
        if together is not None:
            several = len(grids) > 1
            # What one of several images looks like does not depend on how many they are.
            arguments["batch_num_images"] = torch.tensor([2 if several else 1])
            tiles = 1 if several else tiles
        return [(None, None, {**arguments, "pixel_values": inputs["pixel_values"][one, :tiles]})]

    def tower(self, model: PreTrainedModel) -> nn.Module | None:
        return model.model.vision_tower  # type: ignore[no-any-return]

    def looked_at(
        self, model: PreTrainedModel, received: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor | None:
        if inputs.get("image_sizes") is None:
            return None  # a video, whose frames are pooled
        sizes = torch.as_tensor(inputs["image_sizes"]).reshape(-1, 2)
        tiles = [tiles_of(model, size) for size in sizes.tolist()]
        if inputs.get("batch_num_images") is not None:
            counts = torch.as_tensor(inputs["batch_num_images"]).flatten().tolist()
            alone = [count == 1 for count in counts for _ in range(count)]
            tiles = [many if tiled else 1 for many, tiled in zip(tiles, alone, strict=True)]
        patches = without_class_token(model, received)[..., None]
        packed, _ = model.model.pack_image_features(
            patches.split(tiles),
            sizes,
            image_newline=torch.zeros(1),
            vision_aspect_ratio=model.config.vision_aspect_ratio,
        )
        return torch.cat(packed).flatten()

    def _tiled(self, model: PreTrainedModel, size: Sequence[int]) -> Grid:
        side = side_of(model)
        rows, columns = mosaic_shape(model, size)
        most = int(model.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return view_and_mosaic(side, rows, columns)

    @staticmethod
    def _videos_from_ids(kinds: Sequence[Tensor], side: int) -> list[Grid]:
        """Videos whose features were computed before: each run of placeholders is one."""
        grids = []
        for row in kinds:
            values, lengths = torch.unique_consecutive(row, return_counts=True)
            for length in lengths[values == VIDEO].tolist():
                grids.append(closed_by_newline(max(1, (length - 1) // side**2), side, side))
        return grids
