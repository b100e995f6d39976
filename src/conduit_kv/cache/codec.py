r"""Codes of 2, 3, 4 or 8 bits, really packed, with their scales and zeros in 16 bit.

Asymmetric and group-wise: of each group of :data:`GROUP` numbers the smallest becomes code 0 and
the largest code :math:`2^b - 1`,

.. math:: x \approx z + s\,c, \qquad c = \mathrm{round}\bigl((x - z) / s\bigr)

with ``z`` and ``s`` in fp16, and codes chosen for ``z`` and ``s`` as they are stored. Keys are
grouped over tokens, channel by channel, because a few channels of K are much larger than the rest;
values are grouped over channels, token by token (KIVI, https://arxiv.org/abs/2402.02750).

Layouts
-------
The layouts are those that a decode kernel wants: :data:`LANES` neighbours lie side by side, so that
one vector register holds one code of each, and the further codes of a word belong to the same lane.

==============  ==================================  ===============================================
keys            ``[P, S/16, W, 16]`` int32          lane = token; a word holds channels
key scales      ``[P, S/32, 2, d]`` fp16            scale and zero of a channel in 32 tokens
values          ``[P, S/32, D/16, b, 16]`` int32    lane = channel; a word holds tokens
value scales    ``[P, S/32, C, 2, 32]`` fp16        scale and zero of a token in 32 channels
==============  ==================================  ===============================================

``P`` rows (KV heads), ``S`` tokens filled up to whole groups, ``D`` channels filled up to whole
lanes, ``W = d b / 32`` words, ``C = d / 32`` groups of channels. Three bits are a plane of two and
a plane of one, so that no bit of a word is unused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.errors import ModelError

BITS = (2, 3, 4, 8)
"""Code lengths that can be packed."""
GROUP = 32
"""Numbers that share a scale and a zero."""
LANES = 16
"""Neighbours that lie side by side."""

_LARGEST = torch.finfo(torch.float16).max


def planes(bits: int) -> tuple[int, ...]:
    """The planes of 1, 2, 4 or 8 bits that codes of ``bits`` are stored in, lowest bits first."""
    return (2, 1) if bits == 3 else (bits,)


def whole(count: int, unit: int) -> int:
    """``count`` filled up to whole units."""
    return -(-count // unit) * unit


def payload_bits(bits: int, width: int) -> float:
    """Bits of a key's code as stored: more than ``bits`` where ``width`` leaves a word unfilled."""
    return sum(32 * -(-width * plane // 32) for plane in planes(bits)) / width


# -- scales --------------------------------------------------------------------------------------


def _codes(x: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of ``x`` fp32 as int32, and scale and zero over dimension ``dim``, kept as 1."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    if not bool((torch.maximum(-low, high) <= _LARGEST).all()):  # False for NaN too
        raise ModelError(
            "keys or values are not finite, or too large for 16-bit scales: run the model in fp32 "
            "or bf16, or hold the cache in full precision"
        )
    steps = (1 << bits) - 1
    zero = low.half()
    scale = ((high - zero.float()) / steps).half()
    known = scale.float()
    codes = (x - zero.float()) / torch.where(known > 0, known, math.inf)
    return codes.round_().clamp_(0, steps).to(torch.int32), scale, zero


# -- words ---------------------------------------------------------------------------------------


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., n]`` int32 to words ``[..., w]`` int32, plane after plane."""
    words, shift = [], 0
    for plane in planes(bits):
        per = 32 // plane
        part = (codes >> shift) & ((1 << plane) - 1)
        part = F.pad(part, (0, -part.shape[-1] % per)).unflatten(-1, (-1, per))
        word = part[..., 0].clone()
        for place in range(1, per):
            word |= part[..., place] << (place * plane)
        words.append(word)
        shift += plane
    return torch.cat(words, dim=-1)


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of :func:`_pack`: ``[..., count]`` uint8."""
    codes = torch.zeros((*words.shape[:-1], count), dtype=torch.uint8, device=words.device)
    shift, start = 0, 0
    for plane in planes(bits):
        per, mask = 32 // plane, (1 << plane) - 1
        stop = start + -(-count // per)
        part = words[..., start:stop]
        for place in range(min(per, count)):
            found = ((part >> (place * plane)) & mask).to(torch.uint8) << shift
            target = codes[..., place::per]
            target |= found[..., : target.shape[-1]]
        shift, start = shift + plane, stop
    return codes


def _fill(x: Tensor, dim: int, unit: int) -> Tensor:
    """``x`` filled up to whole units by repeating its last entry, which widens no range."""
    missing = -x.shape[dim] % unit
    if not missing:
        return x
    return torch.cat([x, x.narrow(dim, x.shape[dim] - 1, 1).expand_as(x.narrow(dim, 0, 1))
                      .repeat_interleave(missing, dim)], dim)  # fmt: skip


# -- K per channel -------------------------------------------------------------------------------


def encode_by_channel(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Pack ``[P, S, d]`` with a scale per channel and group of tokens.

    Returns
    -------
    words : Tensor
        ``[P, S/16, W, 16]`` int32.
    scales : Tensor
        ``[P, S/32, 2, d]`` fp16, scale and zero.

    Raises
    ------
    ModelError
        If a number is not finite or beyond fp16.
    """
    x = _fill(x.float(), 1, GROUP).unflatten(1, (-1, GROUP))
    codes, scale, zero = _codes(x, bits, 2)
    words = _pack(codes.flatten(1, 2).unflatten(1, (-1, LANES)), bits)
    return words.transpose(2, 3).contiguous(), torch.cat([scale, zero], dim=2)


def decode_by_channel(
    words: Tensor, scales: Tensor, bits: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``[P, S, d]`` with ``S`` in whole groups."""
    codes = _unpack(words.transpose(2, 3), bits, scales.shape[-1]).flatten(1, 2)
    scale, zero = scales.float().unbind(2)
    x = codes.unflatten(1, (-1, GROUP)).float() * scale[:, :, None] + zero[:, :, None]
    found: Tensor = x.flatten(1, 2).to(dtype)
    return found


# -- V (and RTN's K) per token -------------------------------------------------------------------


def encode_by_token(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Pack ``[P, S, d]`` with a scale per token and group of channels.

    Returns
    -------
    words : Tensor
        ``[P, S/32, D/16, b, 16]`` int32.
    scales : Tensor
        ``[P, S/32, C, 2, 32]`` fp16, scale and zero.

    Raises
    ------
    ModelError
        If a number is not finite or beyond fp16.
    """
    width = x.shape[2]
    x = _fill(_fill(x.float(), 1, GROUP), 2, GROUP).unflatten(2, (-1, GROUP))
    codes, scale, zero = _codes(x, bits, 3)
    codes = codes.flatten(2)[..., : whole(width, LANES)]
    codes = codes.unflatten(1, (-1, GROUP)).unflatten(3, (-1, LANES))  # [P, N, 32, D/16, 16]
    words = _pack(codes.permute(0, 1, 3, 4, 2), bits).transpose(3, 4).contiguous()
    pair = torch.cat([scale, zero], dim=3).unflatten(1, (-1, GROUP))  # [P, N, 32, C, 2]
    return words, pair.permute(0, 1, 3, 4, 2).contiguous()


def decode_by_token(
    words: Tensor, scales: Tensor, bits: int, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``[P, S, width]`` with ``S`` in whole groups."""
    codes = _unpack(words.transpose(3, 4), bits, GROUP)  # [P, N, D/16, 16, 32]
    codes = codes.permute(0, 1, 4, 2, 3).flatten(3).flatten(1, 2)[..., :width]
    pair = scales.permute(0, 1, 4, 2, 3).flatten(1, 2).float()  # [P, S, C, 2]
    scale, zero = pair.repeat_interleave(GROUP, dim=2)[:, :, :width].unbind(3)
    x: Tensor = codes.float() * scale + zero
    return x.to(dtype)
