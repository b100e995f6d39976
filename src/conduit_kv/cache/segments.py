"""How a layer holds keys and values: segments.

A segment stores K and V of some tokens at KV-head granularity together with which tokens they are.
Attention runs over each segment and merges (``attention/merge.py``), so that a layer may hold
segments of different kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from conduit_kv.attention.paths import TILE, Mask, attend

_SLACK = 16
"""Slots allocated beyond those needed, so that decoding appends in place."""
_GROWTH = 1.25
"""When the slack is used up the buffers grow by this factor."""


def _writing(buffer: Tensor) -> AbstractContextManager[object]:
    """Where a buffer that was made under inference mode may be written."""
    outside = buffer.is_inference() and not torch.is_inference_mode_enabled()
    return torch.inference_mode() if outside else nullcontext()


class Segment(ABC):
    """Keys and values of some tokens of a batch, in one layer."""

    @abstractmethod
    def attend(
        self, query: Tensor, scaling: float, rows: Tensor, window: int | None, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of ``query`` ``[B, H, n, d]`` over the segment.

        Parameters
        ----------
        rows : Tensor
            ``[B, n]``, the tokens that the query rows are; -1 for padding.
        window : int or None
            Sliding window of the layer.

        Returns
        -------
        Tensor
            ``[B, H, n, d]``.
        Tensor or None
            Log-sum-exp ``[B, H, n]``, if ``with_lse``.
        """

    @abstractmethod
    def held(self, row: int, head: int) -> Tensor:
        """``[S]`` int64, the tokens that a sequence's KV head holds here, in slot order."""

    @abstractmethod
    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        """K and V ``[S, d]`` of :meth:`held`."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Slots attended per sequence and head, the longest if they differ."""

    @property
    def heads_agree(self) -> bool:
        """Whether all KV heads hold the same tokens here."""
        return False

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held: its kind, itself, and the bytes of it in use."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> Segment:
        """The segment of the batch's sequences ``rows``, which may repeat."""


class DenseSegment(Segment):
    """Full-precision slots in buffers that grow: what prefill fills and decoding appends to.

    Parameters
    ----------
    keys, values : Tensor
        ``[B, G, S, d]``; taken over, with ``slack`` slots to spare if ``S`` is not all of it.
    index : Tensor
        ``[B, g, S]`` int32, g = 1 if all KV heads hold the same tokens, else G; -1 for a slot that
        holds none (padding, or a sequence that keeps fewer tokens than its neighbours).
    length : int
        Slots in use.
    holes : bool
        Whether some slot in use holds no token.

    Attributes
    ----------
    open : bool
        Whether the newest slots are being written in an order of their own, by rows that need not
        be neighbours: a row then sees what its token may see, wherever that lies.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, index: Tensor, length: int, holes: bool
    ) -> None:
        self._keys, self._values, self._index = keys, values, index
        self.length = length
        self.holes = holes
        self.open = False

    @staticmethod
    def empty(like_keys: Tensor, like_values: Tensor, index_heads: int = 1) -> DenseSegment:
        """No slots yet, shaped like ``[B, G, *, d]``."""
        batch = like_keys.shape[0]
        return DenseSegment(
            like_keys.new_empty((*like_keys.shape[:2], 0, like_keys.shape[3])),
            like_values.new_empty((*like_values.shape[:2], 0, like_values.shape[3])),
            torch.empty((batch, index_heads, 0), dtype=torch.int32, device=like_keys.device),
            0,
            False,
        )

    @property
    def slots(self) -> int:
        return self.length

    @property
    def keys(self) -> Tensor:
        """``[B, G, S, d]``."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """``[B, G, S, d]``."""
        return self._values[:, :, : self.length]

    @property
    def index(self) -> Tensor:
        """``[B, g, S]`` int32."""
        return self._index[:, :, : self.length]

    def append(self, keys: Tensor, values: Tensor, tokens: Tensor, holes: bool) -> None:
        """Append ``n`` slots: K and V ``[B, G, n, d]`` of ``tokens`` ``[B, n]`` int32."""
        start, stop = self.length, self.length + keys.shape[2]
        with nullcontext() if keys.requires_grad else _writing(self._index):
            if stop > self._keys.shape[2]:
                self._grow(stop)
            self._keys[:, :, start:stop] = keys
            self._values[:, :, start:stop] = values
            self._index[:, :, start:stop] = tokens[:, None]
        self.length = stop
        self.holes = self.holes or holes

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Overwrite K and V ``[B, G, m, d]`` of ``slots`` ``[m]``, whose tokens stay."""
        with _writing(self._index):
            self._keys[:, :, slots] = keys
            self._values[:, :, slots] = values

    def _grow(self, needed: int) -> None:
        capacity = needed + _SLACK
        if self.length:
            capacity = max(capacity, int(self._keys.shape[2] * _GROWTH))
        capacity = -(-capacity // TILE) * TILE

        def grown(old: Tensor, beyond: int) -> Tensor:
            new = old.new_empty((*old.shape[:2], capacity, *old.shape[3:]))
            new[:, :, : self.length] = old[:, :, : self.length]
            new[:, :, self.length :] = beyond  # attention runs over whole tiles
            return new

        self._keys, self._values = grown(self._keys, 0), grown(self._values, 0)
        self._index = grown(self._index, -1)

    def attend(
        self, query: Tensor, scaling: float, rows: Tensor, window: int | None, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        by_token = self.holes or self.open or window is not None
        mask = Mask(self._index, rows, window) if by_token else None
        return attend(
            query,
            self._keys,
            self._values,
            scaling,
            slots=self.length,
            new=0 if self.open else query.shape[2],
            mask=mask,
            with_lse=with_lse,
        )

    def _used(self, row: int, head: int) -> Tensor | slice:
        if not self.holes:
            return slice(None)
        return self.index[row, min(head, self._index.shape[1] - 1)] >= 0

    def held(self, row: int, head: int) -> Tensor:
        index = self.index[row, min(head, self._index.shape[1] - 1)]
        return index[self._used(row, head)].long().cpu()

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        used = self._used(row, head)
        return self.keys[row, head][used], self.values[row, head][used]

    @property
    def heads_agree(self) -> bool:
        """Whether all KV heads hold the same tokens."""
        return self._index.shape[1] == 1

    def crop(self, slots: int) -> None:
        """Forget the last ``slots`` slots."""
        self.length -= slots
        with _writing(self._index):
            self._index[:, :, self.length :] = -1

    def remove(self, slots: Tensor) -> None:
        """Drop ``slots`` ``[m]`` int64 ascending of a batch of one; later ones move up in order."""
        first, length = int(slots[0]), self.length - len(slots)
        if len(slots) == 1:
            later: Tensor | slice = slice(first + 1, self.length)
        else:
            left = torch.ones(self.length - first, dtype=torch.bool)
            left[slots - first] = False
            later = (left.nonzero().flatten() + first).to(self._index.device)
        with _writing(self._index):
            for tensor in (self._keys, self._values, self._index):
                tensor[:, :, first:length] = tensor[:, :, later].clone()
            self._index[:, :, length : self.length] = -1
        self.length = length

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        index = self.index
        tokens = int((index >= 0).sum()) if self.holes else index.numel()
        for kind, tensor in (("keys", self._keys), ("values", self._values)):
            of_a_token = tensor.shape[1] // index.shape[1] * tensor.shape[3]
            yield kind, tensor, tokens * of_a_token * tensor.element_size()
        yield "index", self._index, index.numel() * index.element_size()

    def copy(self) -> DenseSegment:
        """The same tokens in buffers of its own."""
        return DenseSegment(
            self.keys.clone(), self.values.clone(), self.index.clone(), self.length, self.holes
        )

    def select_rows(self, rows: Tensor) -> DenseSegment:
        return DenseSegment(
            self._keys.index_select(0, rows),
            self._values.index_select(0, rows),
            self._index.index_select(0, rows),
            self.length,
            self.holes,
        )


class RaggedSegment(Segment):
    """KV heads that hold different numbers of tokens, without padding: memory really saved.

    Parameters
    ----------
    parts : list of list of (Tensor, Tensor, Tensor)
        Per sequence, per KV head: keys ``[S, d]``, values ``[S, d]`` and tokens ``[S]`` int32.
    """

    def __init__(self, parts: list[list[tuple[Tensor, Tensor, Tensor]]]) -> None:
        self._shape = [[len(head[2]) for head in row] for row in parts]
        flat = [head for row in parts for head in row]
        self._keys = torch.cat([head[0] for head in flat])
        self._values = torch.cat([head[1] for head in flat])
        self._index = torch.cat([head[2] for head in flat])

    def _parts(self) -> Iterator[tuple[int, int, slice]]:
        start = 0
        for row, heads in enumerate(self._shape):
            for head, size in enumerate(heads):
                yield row, head, slice(start, start + size)
                start += size

    def _slice(self, row: int, head: int) -> slice:
        return next(part for r, h, part in self._parts() if (r, h) == (row, head))

    @property
    def slots(self) -> int:
        return max(size for row in self._shape for size in row)

    def attend(
        self, query: Tensor, scaling: float, rows: Tensor, window: int | None, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, heads, n, _ = query.shape
        group = heads // len(self._shape[0])
        output = query.new_empty((batch, heads, n, self._values.shape[-1]))
        lse = query.new_empty((batch, heads, n), dtype=torch.float32)
        # Everything here is older than the query rows: no row is hidden from any.
        for row, head, part in self._parts():
            mine = slice(head * group, (head + 1) * group)
            if part.start == part.stop:
                output[row, mine] = 0.0
                lse[row, mine] = float("-inf")
                continue
            part_output, part_lse = attend(
                query[row : row + 1, mine],
                self._keys[None, None, part],
                self._values[None, None, part],
                scaling,
                slots=part.stop - part.start,
                new=0,
                with_lse=True,
            )
            output[row, mine] = part_output[0]
            if part_lse is not None:
                lse[row, mine] = part_lse[0]
        return output, lse

    def held(self, row: int, head: int) -> Tensor:
        return self._index[self._slice(row, head)].long().cpu()

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        part = self._slice(row, head)
        return self._keys[part], self._values[part]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        for kind, tensor in (
            ("keys", self._keys),
            ("values", self._values),
            ("index", self._index),
        ):
            yield kind, tensor, tensor.numel() * tensor.element_size()

    def select_rows(self, rows: Tensor) -> RaggedSegment:
        return RaggedSegment(
            [
                [
                    (*self.read(row, head), self._index[self._slice(row, head)])
                    for head in range(len(self._shape[row]))
                ]
                for row in rows.tolist()
            ]
        )
