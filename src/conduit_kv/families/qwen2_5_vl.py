"""Qwen2.5-VL: M-RoPE, with a video's time axis in real seconds, truncated to integers."""

from __future__ import annotations

from conduit_kv.families.mrope import MRope


class Qwen25VL(MRope):
    """``Qwen2_5_VLForConditionalGeneration``."""

    name = "Qwen2.5-VL"
    model_types = ("qwen2_5_vl",)
