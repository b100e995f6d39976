"""Pieces that several evict methods are made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.methods.evict.select import PROTECTED, SINKS
from conduit_kv.view import LayerView

_AT_ONCE = 1 << 22  # floats of head-mean attention that may be kept for a second look: 16 MB


def head_mean_blocks(view: LayerView, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention of ``rows``, mean over all query heads, a block of rows at a time.

    Yields
    ------
    rows : Tensor
        ``[r]``, in the order given.
    weights : Tensor
        ``[r, S]`` fp32 on the CPU.
    """
    for block, attention in view.visible_blocks(rows):
        yield block, F.pad(attention.mean(0).cpu(), (0, view.size - attention.shape[-1]))


def head_mean_twice(view: LayerView, rows: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """:func:`head_mean_blocks` for two passes: remembered where that is small."""
    if len(rows) * view.size <= _AT_ONCE:
        return list(head_mean_blocks(view, rows))
    return _Again(view, rows)


class _Again:
    """Blocks that are computed anew for each pass over them."""

    def __init__(self, view: LayerView, rows: Tensor) -> None:
        self.view, self.rows = view, rows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return head_mean_blocks(self.view, self.rows)


def mean_column_sums(view: LayerView, rows: Tensor) -> Tensor:
    """``[S]`` fp32 on the CPU: head-mean attention received, summed over ``rows``."""
    total = torch.zeros(view.size)
    for _, attention in view.visible_blocks(rows):
        total[: attention.shape[-1]] += attention.sum(1).mean(0).cpu()
    return total


def carried(view: LayerView) -> Tensor:
    """``[G, S]`` fp32 on the CPU: what the last scores carried over; 0 where there is nothing."""
    if view.carried is None:
        return torch.zeros(view.kv_heads, view.size)
    return view.carried.float().cpu().expand(view.kv_heads, view.size)


def sinks_and_last(view: LayerView, tier: Tensor) -> Tensor:
    """``tier`` with the sequence's first four tokens and its newest one never evicted."""
    tier = tier.clone()
    tier[:SINKS].masked_fill_(view.index[:SINKS] < SINKS, PROTECTED)  # candidates ascend
    tier[-1] = PROTECTED
    return tier


def newest(tier: Tensor, count: int, level: int) -> Tensor:
    """``tier`` with the last ``count`` candidates (at least one) raised to ``level``."""
    tier = tier.clone()
    tier[-max(count, 1) :].clamp_(min=level)
    return tier


def after_images(view: LayerView) -> Tensor:
    """``[R']`` int64: the step's text rows after the last image, or the nearest thing to them.

    All rows where the sequence has no image; the newest row where nothing follows the last image.
    """
    visual = torch.nonzero(view.layout.visual).flatten()
    rows = view.rows[view.rows > visual[-1]] if len(visual) else view.rows
    return rows if len(rows) else view.last_row


_WRAP = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int64 with the bits of ``value`` modulo 2 ** 64."""
    value &= _WRAP
    return value - (1 << 64) if value >> 63 else value


def uniform_noise(seed: int, layer: int, index: Tensor) -> Tensor:
    """Random numbers in [0, 1) that depend on the seed, the layer and the token alone.

    SplitMix64 of the token's place in a stream chosen by ``seed`` and ``layer``: batched or single,
    chunked or whole, a token gets the same number.

    Parameters
    ----------
    index : Tensor
        ``[S]`` int64, places in the sequence.

    Returns
    -------
    Tensor
        ``[S]`` fp32.
    """
    start = _signed(seed * 0xD1342543DE82EF95 + layer * 0xDA942042E4DD58B5 + 0x632BE59BD9B4E019)
    state = (index.cpu() + 1) * _signed(0x9E3779B97F4A7C15) + start
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    state = state ^ _shifted(state, 31)
    return _shifted(state, 40).float() / (1 << 24)


def _shifted(state: Tensor, shift: int) -> Tensor:
    """A logical shift to the right of int64."""
    return (state >> shift) & ((1 << (64 - shift)) - 1)
