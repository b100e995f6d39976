"""One small adapter per model family."""

from __future__ import annotations

from transformers import PreTrainedModel

from conduit_kv.errors import ModelError
from conduit_kv.families.base import Family
from conduit_kv.families.llava import Llava

FAMILIES: tuple[Family, ...] = (Llava(),)
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
        "docs/structure.md says how to add a family."
    )


__all__ = ["FAMILIES", "Family", "family_of"]
