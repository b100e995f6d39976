"""What a method may see of one layer of one sequence, computed only when asked for.

A view covers the KV heads of a layer that hold the same tokens, without padding, so that a method
never meets a batch, a position id or a hole. Queries are those of the step's own tokens: the whole
prompt in the first prefill, the new tokens of a later turn, one token in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from conduit_kv.layout import Layout

_BLOCK_FLOATS = 1 << 24  # 64 MB of fp32 scores at a time, whatever the prompt's length


@dataclass
class LayerView:
    """One layer of one sequence.

    Attributes
    ----------
    layer, n_layers : int
        Which decoder layer, of how many.
    index : Tensor
        ``[S]`` int64 ascending, the candidates: for each token that the layer holds, its index in
        the sequence. Scores are given in this order.
    layout : Layout
        Of the ``S`` candidates.
    keys, values : Tensor
        ``[G, S, d]``, RoPE applied to the keys, at KV-head granularity.
    step_queries : Tensor
        ``[H, R, d]``, RoPE applied, of the step's ``R`` own tokens: the last ``R`` candidates.
    scaling : float
        Factor of the attention logits.
    carried : Tensor or None
        ``[G, S]``, what the method's last scores carried over; 0 for the step's own tokens.
    cover_rank : callable
        ``cover_rank(by)`` gives ``[S]`` int64 ranks: the visual tokens in an order whose every
        prefix covers the image (see :func:`conduit_kv.methods.cover.farthest_first`).
    unrotate : callable or None
        Takes RoPE off keys ``[G, S, d]``; behind :attr:`position_free_keys`.
    """

    layer: int
    n_layers: int
    index: Tensor
    layout: Layout
    keys: Tensor
    values: Tensor
    step_queries: Tensor
    scaling: float
    carried: Tensor | None = None
    cover_rank: Callable[[str], Tensor] | None = None
    unrotate: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """``S``, the number of candidates."""
        return int(self.keys.shape[1])

    @property
    def kv_heads(self) -> int:
        """``G``."""
        return int(self.keys.shape[0])

    @property
    def heads(self) -> int:
        """``H``, query heads of this view."""
        return int(self.step_queries.shape[0])

    @cached_property
    def rows(self) -> Tensor:
        """``[R]`` int64, the candidates that have queries in this step: the last ``R``."""
        queries = self.step_queries.shape[1]
        return torch.arange(self.size - queries, self.size)

    @property
    def last_row(self) -> Tensor:
        """``[1]``, the newest token."""
        return self.rows[-1:]

    @property
    def position_free_keys(self) -> Tensor:
        """``[G, S, d]``, the keys with RoPE taken off."""
        if self.unrotate is None:
            raise RuntimeError("this view was made without positions")
        return self.unrotate(self.keys, self.index)

    def rows_where(self, mask: Tensor) -> Tensor:
        """``[R']`` int64, those rows with queries at which ``mask`` ``[S]`` bool is True."""
        return self.rows[mask[self.rows]]

    def queries(self, rows: Tensor) -> Tensor:
        """``[H, R', d]`` of candidates ``rows`` ``[R']``, which must be among :attr:`rows`."""
        first = self.size - self.step_queries.shape[1]
        if len(rows) and int(rows.min()) < first:
            raise IndexError("only the step's own tokens have queries")
        return self.step_queries[:, rows - first]

    def attention_blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Attention of ``rows`` to all candidates, a block of rows at a time.

        Parameters
        ----------
        rows : Tensor
            ``[R']`` int64, among :attr:`rows`.

        Yields
        ------
        rows : Tensor
            ``[r]``, the block's rows.
        weights : Tensor
            ``[H, r, S]`` fp32: softmax of ``q k^T * scaling`` over the candidates that the row
            sees (itself and what came before). Memory is bounded, never ``T x T``.
        """
        group = self.heads // self.kv_heads
        step = max(1, _BLOCK_FLOATS // (self.heads * self.size))
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            query = self.queries(block).reshape(self.kv_heads, group * len(block), -1)
            logits = torch.matmul(query, self.keys.transpose(1, 2)).float() * self.scaling
            logits = logits.view(self.kv_heads * group, len(block), self.size)
            hidden = torch.arange(self.size, device=logits.device) > block[:, None].to(
                logits.device
            )
            yield block, logits.masked_fill_(hidden, float("-inf")).softmax(-1)

    def attention(self, rows: Tensor) -> Tensor:
        """``[H, R', S]`` fp32 for a FEW rows; see :meth:`attention_blocks` for many."""
        blocks = [weights for _, weights in self.attention_blocks(rows)]
        if not blocks:
            return self.keys.new_zeros((self.heads, 0, self.size), dtype=torch.float32)
        return torch.cat(blocks, dim=1)

    def group_mean(self, per_head: Tensor) -> Tensor:
        """Average the query heads of each KV head: ``[H, ...]`` to ``[G, ...]``."""
        return per_head.unflatten(0, (self.kv_heads, -1)).mean(1)

    def column_sums(self, rows: Tensor) -> Tensor:
        """``[G, S]`` fp32: attention received from ``rows``, summed over them, group-mean."""
        total = self.keys.new_zeros((self.kv_heads, self.size), dtype=torch.float32)
        for _, weights in self.attention_blocks(rows):
            total += self.group_mean(weights.sum(1))
        return total
