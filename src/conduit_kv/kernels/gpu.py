"""Decode attention over packed keys and values on a GPU, in Triton.

One program reads one range of tokens of one KV head: codes are unpacked in registers, turned into
numbers there, and never written out. Ranges are merged by their log-sum-exp afterwards (split-K),
so that a long cache of one request fills the device.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from conduit_kv.cache.codec import GROUP, LANES, planes

try:
    from conduit_kv.kernels import triton_code
except ImportError:  # without Triton the PyTorch reference runs
    triton_code = None  # type: ignore[assignment]

BLOCK = 64
"""Tokens that a program reads at a time."""
_ROWS = 16
"""Query heads of a KV head, filled up to what a matrix product takes."""
_PROGRAMS = 8
"""Programs per multiprocessor that a call aims at."""


def available() -> bool:
    """Whether Triton is installed."""
    return triton_code is not None


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
    triton_code.attend[(pairs, splits)](
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
