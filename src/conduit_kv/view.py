"""What a method may see of one layer of one sequence, computed only when asked for.

A view covers the KV heads of a layer that hold the same tokens, without padding, so that a method
never meets a batch, a position id or a hole. Queries are those of the step's own tokens: the whole
prompt in the first prefill, the new tokens of a later turn, one token in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.layout import Layout

if TYPE_CHECKING:
    from conduit_kv.families.encoder import Looked

_BLOCK_FLOATS = 1 << 24  # 64 MB of fp32 scores at a time, whatever the prompt's length
_SPANS = 8  # parts of the sequence whose rows are scored apart: a row sees what came before it


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
        ``[H, R, d]``, RoPE applied, of the tokens that the step ran: the last ``R`` candidates,
        unless ``ran`` says which.
    scaling : float
        Factor of the attention logits.
    carried : Tensor or None
        ``[G, S]`` or ``[1, S]``, what the method's last scores carried over; 0 for the step's own
        tokens.
    cover_rank : callable
        ``cover_rank(by)`` gives ``[S]`` int64 ranks: the visual tokens in an order whose every
        prefix covers the image (see :func:`conduit_kv.methods.cover.farthest_first`).
    unrotate : callable or None
        Takes RoPE off keys ``[G, S, d]``; behind :attr:`position_free_keys`.
    ran : Tensor or None
        ``[R]`` int64 ascending, the candidates that the step ran, where images were reused and
        most of their tokens did not run.
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
    ran: Tensor | None = None

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
        """``[R]`` int64, the candidates that have queries in this step."""
        if self.ran is not None:
            return self.ran
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
        if self.ran is not None:
            at = torch.searchsorted(self.ran, rows).clamp(max=len(self.ran) - 1)
            known = torch.equal(self.ran[at], rows)
        else:
            at = rows - (self.size - self.step_queries.shape[1])
            known = not len(rows) or int(at.min()) >= 0
        if not known:
            raise IndexError("only the tokens that the step ran have queries")
        return self.step_queries[:, at]

    @cached_property
    def _keys_fp32(self) -> Tensor:
        # Scores decide rankings; and bf16 products are compiled anew for each S on a CPU.
        return self.keys.float()

    def visible_blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Attention of ``rows`` to the candidates that they see, a block of rows at a time.

        Parameters
        ----------
        rows : Tensor
            ``[R']`` int64, among :attr:`rows`.

        Yields
        ------
        rows : Tensor
            ``[r]``, the block's rows.
        weights : Tensor
            ``[H, r, s]`` fp32: softmax of ``q k^T * scaling`` over the candidates that the row
            sees (itself and what came before). ``s`` is what the block's last row sees: columns
            from there on are 0. Memory is bounded, never ``T x T``.
        """
        group = self.heads // self.kv_heads
        most = max(1, _BLOCK_FLOATS // (self.heads * self.size))
        for block in _runs(rows, most, self.size):
            first, stop = int(block.min()), int(block.max()) + 1
            query = self.queries(block).float().reshape(self.kv_heads, group * len(block), -1)
            keys = self._keys_fp32[:, :stop].transpose(1, 2)
            nothing = query.new_empty((1, 1, 1))
            logits = torch.baddbmm(nothing, query, keys, beta=0, alpha=self.scaling)
            logits = logits.view(self.heads, len(block), stop)
            hidden = torch.arange(first + 1, stop) > block[:, None]
            logits[..., first + 1 :].masked_fill_(hidden.to(logits.device), float("-inf"))
            yield block, logits.softmax(-1)

    def attention_blocks(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """:meth:`visible_blocks` with all columns: weights are ``[H, r, S]``."""
        for block, weights in self.visible_blocks(rows):
            missing = self.size - weights.shape[-1]
            yield block, F.pad(weights, (0, missing)) if missing else weights

    def newest_attention(self) -> Tensor:
        """``[H, S]`` fp32: attention of the newest token, which sees all candidates."""
        query = self.step_queries[:, -1].float().reshape(self.kv_heads, -1, self.keys.shape[-1])
        logits = torch.matmul(query, self._keys_fp32.transpose(1, 2)) * self.scaling
        return logits.softmax(-1).flatten(0, 1)

    def attention(self, rows: Tensor) -> Tensor:
        """``[H, R', S]`` fp32 for a FEW rows; see :meth:`attention_blocks` for many."""
        blocks = [weights for _, weights in self.attention_blocks(rows)]
        if not blocks:
            return self.keys.new_zeros((self.heads, 0, self.size), dtype=torch.float32)
        return torch.cat(blocks, dim=1)

    def group_mean(self, per_head: Tensor) -> Tensor:
        """Average the query heads of each KV head: ``[H, ...]`` to ``[G, ...]``."""
        group = len(per_head) // self.kv_heads
        mean: Tensor = per_head.reshape(self.kv_heads, group, *per_head.shape[1:]).mean(1)
        return mean

    def column_sums(self, rows: Tensor) -> Tensor:
        """``[G, S]`` fp32: attention received from ``rows``, summed over them, group-mean."""
        total = self.keys.new_zeros((self.kv_heads, self.size), dtype=torch.float32)
        for _, weights in self.visible_blocks(rows):
            total[:, : weights.shape[-1]] += self.group_mean(weights.sum(1))
        return total


@dataclass
class StepView:
    """What a method may see of one sequence before a layer: the step's own tokens.

    Attributes
    ----------
    layer, n_layers : int
        The layer that comes next, of how many.
    stage : int
        The how manieth decision of the method it is, from 0.
    index : Tensor
        ``[R]`` int64 ascending, the tokens that may run in it.
    layout : Layout
        Of these tokens.
    hidden : Tensor
        ``[R, D]``, the states with which they enter the layer.
    looked_at : Looked or None
        How much the image encoder looked at each of them (``scores`` ``[R]``, 0 for text), for
        methods that look; None where it cannot be told.
    """

    layer: int
    n_layers: int
    stage: int
    index: Tensor
    layout: Layout
    hidden: Tensor
    _ask: Callable[[], list[LayerView]] = field(repr=False)
    looked_at: Looked | None = None

    @cached_property
    def attention(self) -> list[LayerView]:
        """The layer's queries and keys of these tokens, behind the keys of earlier turns.

        One view per group of KV heads that hold the same earlier tokens. Computed when asked for.
        """
        return self._ask()

    @property
    def newest_attention(self) -> Tensor:
        """``[R]`` fp32 on the CPU: head-mean attention of the newest token to these tokens."""
        parts = [view.newest_attention() for view in self.attention]
        heads = sum(len(part) for part in parts)
        size = len(self.index)
        total: Tensor = torch.stack([part[:, -size:].sum(0) for part in parts]).sum(0) / heads
        return total.cpu()


def _runs(rows: Tensor, most: int, size: int) -> Iterator[Tensor]:
    """``rows`` in runs of at most ``most``, each within one eighth of ``size`` candidates."""
    part = rows // max(size // _SPANS, 1)
    for run in torch.tensor_split(rows, (torch.nonzero(part.diff()).flatten() + 1).tolist()):
        for start in range(0, len(run), most):
            yield run[start : start + most]
