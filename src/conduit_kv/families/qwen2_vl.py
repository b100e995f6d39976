"""Qwen2-VL: M-RoPE, one step of the time axis per frame."""

from __future__ import annotations

from conduit_kv.families.mrope import MRope


class Qwen2VL(MRope):
    """``Qwen2VLForConditionalGeneration``."""

    name = "Qwen2-VL"
    model_types = ("qwen2_vl",)
