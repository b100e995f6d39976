"""Give position-free keys their positions, and take them off again.

Keys are stored before RoPE and rotated once, to the positions that their tokens have in the
request, with the model's own cosines and sines. Nothing is ever moved by a difference of positions:
a video's frame groups are not rigid, since Qwen2.5-VL truncates their times to integers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from conduit_kv.errors import ModelError
from conduit_kv.families import Family

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines ``[1, n, d]``, fp32."""


def rotary_of(text_model: nn.Module, position_ids: Tensor) -> Rotary:
    """The model's cosines and sines of some positions, in fp32.

    Parameters
    ----------
    position_ids : Tensor
        ``[1, n]``, or ``[3, n]`` for M-RoPE. Rotary embeddings that depend on the length of the
        prompt want all of its positions: take columns out of what comes back.
    """
    like = torch.empty((1, 1), dtype=torch.float32, device=_device(text_model))
    ids = position_ids.to(like.device)
    ids = ids[:, None] if ids.shape[0] > 1 else ids
    cos, sin = text_model.rotary_emb(like, ids)  # type: ignore[operator]
    return cos, sin


def columns_of(rotary: Rotary, columns: Tensor) -> Rotary:
    """``[1, m, d]``: those of some of the positions."""
    columns = columns.to(rotary[0].device)
    return rotary[0][:, columns], rotary[1][:, columns]


def rotate(family: Family, text_model: nn.Module, keys: Tensor, rotary: Rotary) -> Tensor:
    """Position-free keys ``[..., G, n, d]`` to keys at the positions of ``rotary``.

    The arithmetic is in fp32, whatever the keys' dtype, so that the result is exact to one
    rounding.
    """
    return _apply(family, text_model, keys, *rotary)


def unrotate(family: Family, text_model: nn.Module, keys: Tensor, rotary: Rotary) -> Tensor:
    """The inverse of :func:`rotate`, to the rounding of the keys that it is given."""
    scale = getattr(text_model.rotary_emb, "attention_scaling", 1.0)  # of cosines and sines
    cos, sin = rotary
    return _apply(family, text_model, keys, cos / scale**2, -sin / scale**2)


def angles(family: Family, text_model: nn.Module, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[T, d/2]`` fp32 of each token, M-RoPE's axes joined.

    Channels ``i`` and ``i + d/2`` of a key are turned by one angle. The model's own rotation of a
    one in the first half says which.

    Parameters
    ----------
    position_ids : Tensor
        ``[1, T]``, or ``[3, T]`` for M-RoPE.
    """
    rotary = rotary_of(text_model, position_ids)
    width, tokens = rotary[0].shape[-1], position_ids.shape[-1]
    probe = torch.zeros((1, 1, tokens, width), device=rotary[0].device)
    probe[..., : width // 2] = 1.0
    cos, sin = rotate(family, text_model, probe, rotary)[0, 0].chunk(2, dim=-1)
    return cos, sin


def _apply(family: Family, text_model: nn.Module, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attention = family.attention(family.layers(text_model)[0])
    module: Any = sys.modules[type(attention).__module__]
    apply = getattr(module, "apply_rotary_pos_emb", None)
    if apply is None:
        raise ModelError(
            f"{type(attention).__name__} rotates its keys in a way of its own: reuse and retrieve "
            "cannot give them other positions"
        )
    flat = keys.reshape(-1, *keys.shape[-3:]).float()
    _, rotated = apply(flat, flat, cos.to(flat.device), sin.to(flat.device))
    return rotated.reshape(keys.shape).to(keys.dtype)  # type: ignore[no-any-return]


def _device(text_model: nn.Module) -> torch.device:
    rotary: Any = text_model.rotary_emb
    return next(rotary.buffers()).device  # type: ignore[no-any-return]
