"""Qwen3-VL: interleaved M-RoPE, deepstack, a video's frames apart with time stamps as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from conduit_kv.families.mrope import MRope


class Qwen3VL(MRope):
    """``Qwen3VLForConditionalGeneration``.

    Features of inner layers of the image encoder are added to the hidden states of the visual
    tokens after the first decoder layers (DeepStack, https://arxiv.org/abs/2406.04334).
    """

    name = "Qwen3-VL"
    model_types = ("qwen3_vl",)

    def frames_are_apart(self) -> bool:
        return True

    def after_layer(
        self, text_model: nn.Module, layer: int, hidden: Tensor, features: Mapping[str, Any]
    ) -> Tensor:
        """Add ``features["deepstack_visual_embeds"][layer]`` ``[V, D]`` to the visual tokens.

        Parameters
        ----------
        hidden : Tensor
            ``[B, T, D]``.
        features : mapping
            ``visual_pos_masks`` ``[B, T]`` bool with ``V`` True places, and
            ``deepstack_visual_embeds``, a list of ``[V, D]``, one per first layer; both may be
            missing or None.
        """
        embeds = features.get("deepstack_visual_embeds")
        if embeds is None or layer >= len(embeds):
            return hidden
        added: Tensor = text_model._deepstack_process(  # type: ignore[operator]
            hidden, features["visual_pos_masks"], embeds[layer]
        )
        return added

    def features_of(self, features: Mapping[str, Any], columns: Tensor) -> Mapping[str, Any]:
        """Deepstack features of those visual tokens that run."""
        embeds = features.get("deepstack_visual_embeds")
        if embeds is None:
            return features
        mask = features["visual_pos_masks"].to(columns.device)
        number = (mask.flatten().long().cumsum(0) - 1).view(mask.shape)  # of a visual token
        at = columns.clamp(min=0)
        chosen = mask.gather(1, at) & (columns >= 0)
        numbers = number.gather(1, at)[chosen]
        picked = [embed[numbers.to(embed.device)] for embed in embeds]
        return {**features, "visual_pos_masks": chosen, "deepstack_visual_embeds": picked}
