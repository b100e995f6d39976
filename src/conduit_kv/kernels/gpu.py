"""Decode attention over packed keys and values on a GPU, in Triton.

One program reads one range of tokens of one KV head: codes are unpacked in registers, turned into
numbers there, and never written out. Ranges are merged by their log-sum-exp afterwards (split-K),
so that a long cache of one request fills the device.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from conduit_kv.cache.codec import GROUP, LANES, planes

try:
    import triton
    import triton.language as tl
except ImportError:  # the PyTorch reference runs
    triton = None

BLOCK = 64
"""Tokens that a program reads at a time."""
_ROWS = 16
"""Query heads of a KV head, filled up to what a matrix product takes."""
_PROGRAMS = 8
"""Programs per multiprocessor that a call aims at."""


def available() -> bool:
    """Whether Triton is installed."""
    return triton is not None


def supports(group: int, widths: tuple[int, int]) -> bool:
    """Whether there is a kernel for ``group`` query heads per KV head of these sizes."""
    return available() and group <= _ROWS and all(w in (16, 32, 64, 128, 256) for w in widths)


def decode(
    query: Tensor,
    keys: Tensor,
    key_scales: Tensor,
    values: Tensor,
    value_scales: Tensor,
    index: Tensor,
    bits: int,
    width: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Attention of one row over packed K and V: see :func:`conduit_kv.kernels.cpu.decode`."""
    pairs, groups = key_scales.shape[0], key_scales.shape[1]
    heads, depth = query.shape
    blocks = -(-groups * GROUP // BLOCK)
    splits = max(1, min(blocks, _programs(query.device) // pairs))
    per_split = -(-blocks // splits)
    splits = -(-blocks // per_split)
    partial = torch.empty((splits, heads, width), dtype=torch.float32, device=query.device)
    sums = torch.empty((splits, heads, 2), dtype=torch.float32, device=query.device)
    first, *second = planes(bits)
    _attend[(pairs, splits)](
        query.contiguous(),
        keys,
        key_scales,
        values,
        value_scales,
        index,
        partial,
        sums,
        len(index),
        groups,
        per_split,
        scaling * math.log2(math.e),
        HEADS=heads,
        GROUP_HEADS=heads // pairs,
        ROWS=_ROWS,
        DEPTH=depth,
        WIDTH=width,
        FIRST=first,
        SECOND=second[0] if second else 0,
        BITS=bits,
        KEY_WORDS=keys.shape[2],
        BLOCK_TOKENS=BLOCK,
        GROUP_TOKENS=GROUP,
        LANE=LANES,
    )
    most = sums[..., 0].amax(0)
    share = torch.exp2(sums[..., 0] - most)
    total = (share * sums[..., 1]).sum(0)
    output = (share[..., None] * partial).sum(0) / total[:, None]
    return output.to(query.dtype), (most + total.log2()) * math.log(2.0)


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # Triton's interpreter, in tests
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


def _jit(function: Any) -> Any:
    return function if triton is None else triton.jit(function)


@_jit
def _codes(words, offset, place, plane, BITS, first):  # type: ignore[no-untyped-def]
    """Codes of one plane: bit ``place * plane`` of the words from ``first`` on."""
    bit = place * plane
    word = tl.load(words + offset + (first + bit // 32) * 16)
    return (word >> (bit % 32)) & ((1 << plane) - 1)


@_jit
def _attend(  # type: ignore[no-untyped-def]
    query, keys, key_scales, values, value_scales, index, partial, sums,
    count, groups, per_split, scaling,
    HEADS: tl.constexpr if triton else None, GROUP_HEADS: tl.constexpr if triton else None,
    ROWS: tl.constexpr if triton else None, DEPTH: tl.constexpr if triton else None,
    WIDTH: tl.constexpr if triton else None, FIRST: tl.constexpr if triton else None,
    SECOND: tl.constexpr if triton else None, BITS: tl.constexpr if triton else None,
    KEY_WORDS: tl.constexpr if triton else None, BLOCK_TOKENS: tl.constexpr if triton else None,
    GROUP_TOKENS: tl.constexpr if triton else None, LANE: tl.constexpr if triton else None,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    real = row < GROUP_HEADS
    channel = tl.arange(0, DEPTH)
    out_channel = tl.arange(0, WIDTH)
    place = (pair * GROUP_HEADS + row)[:, None]
    q = tl.load(query + place * DEPTH + channel[None, :], mask=real[:, None], other=0.0)
    q = q.to(tl.float32) * scaling
    most = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for block in range(split * per_split, (split + 1) * per_split):
        token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        inside = token < groups * GROUP_TOKENS
        safe = tl.where(inside, token, 0)
        held = tl.load(index + safe, mask=token < count, other=-1) >= 0
        group = pair * groups + safe // GROUP_TOKENS

        # Keys: lane = token, a word holds channels.
        lane = (pair * groups * GROUP_TOKENS + safe) // LANE * (KEY_WORDS * LANE) + safe % LANE
        code = _codes(keys, lane[:, None], channel[None, :], FIRST, BITS, 0)
        if SECOND > 0:
            start = (DEPTH * FIRST + 31) // 32
            code |= _codes(keys, lane[:, None], channel[None, :], SECOND, BITS, start) << FIRST
        at = group[:, None] * (2 * DEPTH) + channel[None, :]
        scale = tl.load(key_scales + at).to(tl.float32)
        zero = tl.load(key_scales + at + DEPTH).to(tl.float32)
        k = code.to(tl.float32) * scale + zero
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.where(held[None, :], logits, -1e30)
        highest = tl.maximum(most, tl.max(logits, 1))
        fade = tl.exp2(most - highest)
        weight = tl.where(held[None, :], tl.exp2(logits - highest[:, None]), 0.0)
        total = total * fade + tl.sum(weight, 1)
        most = highest

        # Values: lane = channel, a word holds tokens.
        inner = safe % GROUP_TOKENS
        tile = group[:, None] * (WIDTH // LANE) + out_channel[None, :] // LANE
        lane2 = tile * (BITS * LANE) + out_channel[None, :] % LANE
        code2 = _codes(values, lane2, inner[:, None], FIRST, BITS, 0)
        if SECOND > 0:
            code2 |= _codes(values, lane2, inner[:, None], SECOND, BITS, FIRST) << FIRST
        parts: tl.constexpr = (WIDTH + GROUP_TOKENS - 1) // GROUP_TOKENS
        part = group[:, None] * parts + out_channel[None, :] // GROUP_TOKENS
        at2 = part * (2 * GROUP_TOKENS) + inner[:, None]
        scale2 = tl.load(value_scales + at2).to(tl.float32)
        zero2 = tl.load(value_scales + at2 + GROUP_TOKENS).to(tl.float32)
        v = code2.to(tl.float32) * scale2 + zero2
        found = found * fade[:, None] + tl.dot(weight, v, input_precision="ieee")
    place = (split * HEADS + pair * GROUP_HEADS + row)[:, None]
    tl.store(partial + place * WIDTH + out_channel[None, :], found, mask=real[:, None])
    where = (split * HEADS + pair * GROUP_HEADS + row) * 2
    tl.store(sums + where, most, mask=real)
    tl.store(sums + where + 1, total, mask=real)
