"""LLaVA-1.5: one fixed grid per image, plain RoPE. The embedded model is of this family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from conduit_kv.families.base import Family
from conduit_kv.layout import Grid


class Llava(Family):
    """``LlavaForConditionalGeneration`` over any text model that Conduit can run."""

    name = "LLaVA-1.5"
    model_types = ("llava",)

    def visual_mask(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        return ids == model.config.image_token_id

    def grids(
        self, model: PreTrainedModel, ids: Sequence[Tensor], inputs: Mapping[str, Any]
    ) -> list[list[Grid]]:
        vision = model.config.vision_config
        side = vision.image_size // vision.patch_size
        grid = Grid(1, side, side)
        return [[grid] * (int(self.visual_mask(model, row).sum()) // grid.tokens) for row in ids]
