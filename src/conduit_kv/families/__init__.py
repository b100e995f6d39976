"""One small adapter per model family."""

from __future__ import annotations

from transformers import PreTrainedModel

from conduit_kv.errors import ModelError
from conduit_kv.families.base import Family
from conduit_kv.families.idefics3 import Idefics3, SmolVLM
from conduit_kv.families.internvl import InternVL
from conduit_kv.families.llava import Llava
from conduit_kv.families.llava_next import LlavaNext
from conduit_kv.families.llava_onevision import LlavaOnevision
from conduit_kv.families.qwen2_5_vl import Qwen25VL
from conduit_kv.families.qwen2_vl import Qwen2VL
from conduit_kv.families.qwen3_vl import Qwen3VL

FAMILIES: tuple[Family, ...] = (
    Llava(),
    LlavaNext(),
    LlavaOnevision(),
    Qwen2VL(),
    Qwen25VL(),
    Qwen3VL(),
    InternVL(),
    SmolVLM(),
    Idefics3(),
)
"""All families, in the order of the support matrix."""


def family_of(model: PreTrainedModel) -> Family:
    """The adapter of ``model``.

    Raises
    ------
    ModelError
        If no family covers ``model.config.model_type``.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ModelError(
        f"no adapter for models of type {kind!r}; Conduit knows {known}. "
        "docs/families.md says how to add a family."
    )


__all__ = ["FAMILIES", "Family", "family_of"]
