"""LLaVA-1.5: one fixed grid per image, plain RoPE. The embedded model is of this family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conduit_kv.families.base import Family
from conduit_kv.families.binding import IMAGE, bind, pair
from conduit_kv.families.encoder import has_class_token, without_class_token
from conduit_kv.layout import Grid, View


class Llava(Family):
    """``LlavaForConditionalGeneration`` over any text model and image encoder.

    The number of visual tokens follows from the pixels, as in the processor; the configuration's
    ``image_seq_length`` is not read, since many checkpoints carry a default there.
    """

    name = "LLaVA-1.5"
    model_types = ("llava",)

    def grids(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[list[Grid]]:
        kinds = [self.kinds(model, row) for row in ids]
        pixels = inputs.get("pixel_values")
        patch = pair(model.config.vision_config.patch_size)
        if inputs.get("image_sizes") is not None:  # encoders of any size (Pixtral)
            sizes = torch.as_tensor(inputs["image_sizes"]).reshape(-1, 2).tolist()
        elif pixels is not None:
            sizes = [list(pixels.shape[-2:])] * len(pixels)
        else:  # features computed before: the configuration's size, as many as there are
            size = list(pair(model.config.vision_config.image_size))
            grid = self._grid(model, size, patch)
            sizes = [size] * (sum(int(row.sum()) for row in kinds) // grid.tokens)
        queue = [self._grid(model, size, patch) for size in sizes]
        return bind(kinds, {IMAGE: queue}, complete=self.has_pixels(kinds, inputs))

    def alone(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, Any],
        kind: int,
        number: int,
        grids: Sequence[Grid],
    ) -> list[tuple[int | None, Grid | None, dict[str, Any]]]:
        pixels = inputs["pixel_values"][number : number + 1]
        if inputs.get("image_sizes") is None:
            return [(None, None, {"pixel_values": pixels})]
        sizes = torch.as_tensor(inputs["image_sizes"]).reshape(-1, 2)[number : number + 1]
        height, width = sizes[0].tolist()  # the batch is padded to its largest image
        return [(None, None, {"pixel_values": pixels[..., :height, :width], "image_sizes": sizes})]

    def tower(self, model: PreTrainedModel) -> nn.Module | None:
        return model.model.vision_tower  # type: ignore[no-any-return]

    def looked_at(
        self, model: PreTrainedModel, received: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor | None:
        if inputs.get("image_sizes") is not None:  # encoders of any size merge patches
            return None
        return without_class_token(model, received).flatten()

    def _grid(self, model: PreTrainedModel, size: Sequence[int], patch: tuple[int, int]) -> Grid:
        rows, columns = size[0] // patch[0], size[1] // patch[1]
        full = model.config.vision_feature_select_strategy == "full"
        if full and has_class_token(model.model.vision_tower):
            # The class token comes first; it is labelled as a row of its own below the patches.
            return Grid(1, rows + 1, columns, (View(0, 1, 1, rows), View(0, rows, columns)))
        return Grid(1, rows, columns)
