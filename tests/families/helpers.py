"""What the plain model does, seen from outside: the inputs that reach its text model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature, PreTrainedModel

from conduit_kv.families import Family
from conduit_kv.layout import Layout

_OUTPUT_PROJECTIONS = ("out_proj", "attn.proj", "projection_layer", "attention.o_proj")


class _Enough(Exception):
    pass


def reaching_text_model(
    family: Family, model: PreTrainedModel, call: Any, **arguments: Any
) -> dict[str, Any]:
    """Keyword arguments of the first call of the text model within ``call(**arguments)``."""
    seen: dict[str, Any] = {}

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)
        raise _Enough

    handle = family.text_model(model).register_forward_pre_hook(look, with_kwargs=True)
    deltas = getattr(model.model, "rope_deltas", None)
    try:
        with torch.no_grad():
            call(**arguments)
    except _Enough:
        pass
    finally:
        handle.remove()
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = deltas
    return seen


def unpadded(inputs: BatchFeature) -> list[Tensor]:
    """``[T_b]`` ids of each sequence."""
    masks = inputs["attention_mask"].bool()
    return [row[mask] for row, mask in zip(inputs["input_ids"], masks, strict=True)]


def embeddings(family: Family, model: PreTrainedModel, inputs: BatchFeature) -> list[Tensor]:
    """``[T_b, D]`` of each sequence: what the text model gets, images merged in."""
    seen = reaching_text_model(family, model, model, **inputs)
    masks = inputs["attention_mask"].bool()
    return [row[mask] for row, mask in zip(seen["inputs_embeds"], masks, strict=True)]


def layouts(family: Family, model: PreTrainedModel, inputs: BatchFeature) -> list[Layout]:
    return family.layouts(model, unpadded(inputs), inputs)


def newlines(model: PreTrainedModel, embeds: Tensor) -> Tensor:
    """``[T]`` bool, which embeddings are newlines; they do not depend on any pixel."""
    newline = getattr(model.model, "image_newline", None)
    if newline is None:
        return torch.zeros(len(embeds), dtype=torch.bool)
    return (embeds == newline).all(-1)


def without_vision_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose image encoder mixes no patches, so that a pixel changes its own token only."""
    alone = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in alone.named_modules():
            vision = "vision" in name or "visual" in name
            if vision and name.endswith(_OUTPUT_PROJECTIONS):
                module.weight.zero_()
                if module.bias is not None:
                    module.bias.zero_()
    return alone
