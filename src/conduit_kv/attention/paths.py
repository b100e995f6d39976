"""Ways to compute the same attention, and the choice between them.

All work at KV-head granularity: the query heads of a group are rows of one matrix product, so K
and V are never repeated. ``n`` query rows are the newest tokens; they see everything older and, of
each other, what came before. SDPA is the reference; the grouped product is faster where the table
in ``choice.py`` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention

from conduit_kv.attention.choice import Path_, choose

_BLOCK = 64
TILE = 32
"""Products run over whole tiles of slots: on a CPU each new shape of a bf16 product is compiled,
which takes as long as the product itself, and layers that hold different numbers would differ."""


@dataclass(frozen=True)
class Mask:
    """Which slots the query rows may see, where "everything older" does not say it.

    Attributes
    ----------
    index : Tensor
        ``[B, g, C]``, g = 1 or G: each slot's token; -1 for a slot that holds none.
    rows : Tensor
        ``[B, n]``: each query row's token; -1 for padding.
    window : int or None
        A row sees only the last ``window`` tokens up to itself.
    """

    index: Tensor
    rows: Tensor
    window: int | None = None

    def ends(self, size: int) -> list[int]:
        """Per block of ``size`` rows: the column behind the last one that any of them sees."""
        rows = F.pad(self.rows, (0, -self.rows.shape[1] % size), value=-1)
        newest = rows.unflatten(1, (-1, size)).amax((0, 2))  # [blocks]
        held = self.index.flatten(0, 1)  # a slot counts where any sequence or head holds it so
        first = torch.where(held >= 0, held, torch.iinfo(held.dtype).max).amin(0)
        place = torch.arange(1, len(first) + 1, device=first.device)
        ends: list[int] = (place * (first <= newest[:, None])).amax(1).tolist()
        return ends

    def block(self, start: int, stop: int, columns: int) -> Tensor:
        """``[B, g, rows, columns]`` bool: what rows ``start:stop`` see of the first columns."""
        slots = self.index[:, :, None, :columns]
        rows = self.rows[:, None, start:stop, None]
        seen = (slots >= 0) & (slots <= rows)
        if self.window is not None:
            seen = seen & (slots > rows - self.window)
        return seen


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    *,
    slots: int,
    new: int,
    mask: Mask | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of the newest rows over the slots of one segment.

    Parameters
    ----------
    query : Tensor
        ``[B, H, n, d]``.
    keys, values : Tensor
        ``[B, G, C, d]``, the buffers whole: what lies beyond ``slots`` is finite and not seen.
    scaling : float
        Factor of the logits.
    slots : int
        How many slots are in use.
    new : int
        How many of the last slots are the query rows themselves (``n``, or 0 for a segment that
        holds only older tokens).
    mask : Mask or None
        None if every slot holds a token and there is no window: then a row sees all older slots.
    with_lse : bool
        Also return the log-sum-exp of each row, for merging.

    Returns
    -------
    output : Tensor
        ``[B, H, n, d]``.
    lse : Tensor or None
        ``[B, H, n]`` fp32.
    """
    if mask is None and not with_lse and choose(query, keys, slots, _PATHS) == "sdpa":
        return sdpa(query, keys, values, scaling, slots=slots, new=new), None
    return grouped(query, keys, values, scaling, slots=slots, new=new, mask=mask, with_lse=with_lse)


def sdpa(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, slots: int, new: int
) -> Tensor:
    """PyTorch's scaled dot product attention: see :func:`attend`."""
    n = query.shape[2]
    visible = None
    if new > 1 and slots != n:
        visible = torch.ones(n, slots, dtype=torch.bool, device=query.device).tril(slots - n)
    return scaled_dot_product_attention(
        query,
        keys[:, :, :slots],
        values[:, :, :slots],
        attn_mask=visible,
        is_causal=new > 1 and visible is None,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def grouped(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
    *,
    slots: int,
    new: int,
    mask: Mask | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The grouped, blocked product: see :func:`attend`. Memory is ``H x block x S``."""
    batch, heads, n, width = query.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    group, pairs = heads // kv_heads, batch * kv_heads
    query = (query * scaling).reshape(pairs, group, n, width)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    older = slots - new
    outputs, sums = [], []
    ends = mask.ends(_BLOCK) if mask is not None else []
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        rows = stop - start
        seen = older + stop if new else slots
        if mask is not None:
            seen = max(min(seen, ends[start // _BLOCK]), 1)
        columns = min(-(-seen // TILE) * TILE, capacity)
        part = query[:, :, start:stop].reshape(pairs, group * rows, width)
        logits = _products(part, keys[:, :columns])
        by_row = logits.view(batch, kv_heads, group, rows, columns)
        if mask is not None:
            visible = mask.block(start, stop, columns)[:, :, None]
            by_row.masked_fill_(~visible, -math.inf)
        elif new and rows > 1:
            first = older + start
            place = torch.arange(first, columns, device=query.device)
            later = place > torch.arange(first, first + rows, device=query.device)[:, None]
            by_row[..., first:].masked_fill_(later, -math.inf)
        elif columns > seen:
            logits[..., seen:] = -math.inf
        weights = logits.softmax(-1)
        output = torch.bmm(weights, values[:, :columns])
        if mask is not None:  # a row of padding, or one that sees nothing here
            output.masked_fill_(weights[..., :1].isnan(), 0.0)
        outputs.append(output.view(batch, kv_heads, group, rows, -1))
        if with_lse:
            sums.append(torch.logsumexp(by_row.float(), dim=-1))
    output = (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)).flatten(1, 2)
    lse = torch.cat(sums, dim=3).flatten(1, 2) if with_lse else None
    return output, lse


def _products(query: Tensor, keys: Tensor) -> Tensor:
    """``[P, r, S]``: products of rows ``[P, r, d]`` with keys ``[P, S, d]``.

    Keys lie in buffers with slots to spare. For few rows a product that has the keys on its left
    reads them where they lie; the other order would copy them first.
    """
    if query.shape[1] < 16:
        return torch.bmm(keys, query.transpose(1, 2)).transpose(1, 2).contiguous()
    return torch.bmm(query, keys.transpose(1, 2))


_PATHS: dict[Path_, Callable[[Tensor, Tensor, Tensor, int], object]] = {
    "sdpa": lambda q, k, v, slots: sdpa(q, k, v, 1.0, slots=slots, new=q.shape[2]),
    "grouped": lambda q, k, v, slots: grouped(q, k, v, 1.0, slots=slots, new=q.shape[2]),
}
