"""LLaVA-NeXT: an image is a view of the whole and tiles, whose rows end in newline embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from conduit_kv.families.anyres import mosaic_shape, side_of, sizes_of, tiles_of, view_and_mosaic
from conduit_kv.families.base import Family
from conduit_kv.families.binding import IMAGE, bind
from conduit_kv.families.encoder import without_class_token
from conduit_kv.layout import Grid


class LlavaNext(Family):
    """``LlavaNextForConditionalGeneration`` over any text model.

    Frame 0 of an image is the whole at low resolution; frame 1 its tiles laid together, without
    the padding that brought it to a supported shape, and with newlines as a last column.
    """

    name = "LLaVA-NeXT"
    model_types = ("llava_next",)

    def grids(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[list[Grid]]:
        kinds = [self.kinds(model, row) for row in ids]
        side = side_of(model)
        queue = [
            view_and_mosaic(side, *mosaic_shape(model, size))
            for size in sizes_of(inputs.get("image_sizes"))
        ]
        return bind(kinds, {IMAGE: queue}, complete=self.has_pixels(kinds, inputs))

    def alone(
        self,
        model: PreTrainedModel,
        inputs: Mapping[str, Any],
        kind: int,
        number: int,
        grids: Sequence[Grid],
    ) -> list[tuple[int | None, Grid | None, dict[str, Any]]]:
        one = slice(number, number + 1)
        sizes = torch.as_tensor(inputs["image_sizes"]).reshape(-1, 2)[one]
        tiles = tiles_of(model, sizes[0].tolist())
        return [
            (
                None,
                None,
                {"pixel_values": inputs["pixel_values"][one, :tiles], "image_sizes": sizes},
            )
        ]

    def tower(self, model: PreTrainedModel) -> nn.Module | None:
        return model.model.vision_tower  # type: ignore[no-any-return]

    def looked_at(
        self, model: PreTrainedModel, received: Tensor, inputs: Mapping[str, Any]
    ) -> Tensor | None:
        inner, config = model.model, model.config
        sizes = torch.as_tensor(inputs["image_sizes"]).reshape(-1, 2)
        tiles = [tiles_of(model, size) for size in sizes.tolist()]
        patches = without_class_token(model, received)[..., None]
        # Laid together, cut and ended by newlines in Transformers' own code, as features are.
        packed, _ = inner.pack_image_features(
            patches.split(tiles),
            sizes,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
            image_newline=torch.zeros(1),
        )
        return torch.cat(packed).flatten()
