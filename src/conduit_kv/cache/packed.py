"""Segments that are written once: quantised, or compressed in another way.

Their slots are in an order of their own, of which the segment keeps the tokens. A token that is
dropped later leaves a hole: codes are never computed anew. Where all tokens of a unit that shares
scales are gone, the unit is freed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.attention.paths import Mask, attend
from conduit_kv.cache import codec
from conduit_kv.cache.segments import Segment
from conduit_kv.errors import ModelError
from conduit_kv.kernels import cpu, gpu


class Store(ABC):
    """K and V of ``S`` slots for ``P`` KV heads, in some compressed form."""

    unit: ClassVar[int]
    """Slots that can only be freed together."""
    bits: float
    """Payload bits of one number, scales left out."""
    widths: tuple[int, int]
    """Head size of K and of V."""

    @abstractmethod
    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V ``[P, S', d]``, with ``S'`` the slots filled up to whole units."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor held, and its kind: keys, values or scales."""

    def state(self) -> dict[str, Tensor]:
        """What a hold method's ``restore`` makes it from again, by name."""
        found = vars(self).items()
        return {name: value for name, value in found if isinstance(value, Tensor)}

    @abstractmethod
    def units(self, kept: Tensor) -> Store:
        """The store of some of its units, ``[n]`` int64, gathered whole."""

    @abstractmethod
    def head(self, number: int) -> Store:
        """The store of one of its rows alone."""

    def attend(self, query: Tensor, scaling: float, index: Tensor) -> tuple[Tensor, Tensor] | None:
        """Attention of rows ``[1, H', n, d]`` that see all of it, in a way of its own, or None."""
        return None


@dataclass(frozen=True)
class Quantised(Store):
    """Codes of 2, 3, 4 or 8 bits: see :mod:`conduit_kv.cache.codec`.

    Attributes
    ----------
    keys, key_scales, values, value_scales : Tensor
    widths : (int, int)
    bits : int
    keys_by : {"channel", "token"}
    """

    keys: Tensor
    key_scales: Tensor
    values: Tensor
    value_scales: Tensor
    widths: tuple[int, int]
    bits: int
    keys_by: str = "channel"
    unit: ClassVar[int] = codec.GROUP

    @staticmethod
    def of(keys: Tensor, values: Tensor, bits: int, keys_by: str = "channel") -> Quantised:
        """Pack K and V ``[P, S, d]``.

        Raises
        ------
        ModelError
            If a number is not finite.
        """
        encode = codec.encode_by_channel if keys_by == "channel" else codec.encode_by_token
        widths = (keys.shape[2], values.shape[2])
        return Quantised(
            *encode(keys, bits), *codec.encode_by_token(values, bits), widths, bits, keys_by
        )

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.keys_by == "channel":
            keys = codec.decode_by_channel(self.keys, self.key_scales, self.bits, dtype)
        else:
            keys = codec.decode_by_token(
                self.keys, self.key_scales, self.bits, self.widths[0], dtype
            )
        values = codec.decode_by_token(
            self.values, self.value_scales, self.bits, self.widths[1], dtype
        )
        return keys, values

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "keys", self.keys
        yield "values", self.values
        yield "scales", self.key_scales
        yield "scales", self.value_scales

    def head(self, number: int) -> Quantised:
        mine = slice(number, number + 1)
        return replace(
            self,
            keys=self.keys[mine].clone(),
            key_scales=self.key_scales[mine].clone(),
            values=self.values[mine].clone(),
            value_scales=self.value_scales[mine].clone(),
        )

    def attend(self, query: Tensor, scaling: float, index: Tensor) -> tuple[Tensor, Tensor] | None:
        group = query.shape[1] // self.keys.shape[0]
        kernel = {"cpu": cpu, "cuda": gpu}.get(query.device.type)
        fits = query.shape[2] == 1 and self.keys_by == "channel" and kernel is not None
        if not fits or kernel is None or not kernel.supports(group, self.widths):
            return None
        output, lse = kernel.decode(
            query[0, :, 0],
            self.keys,
            self.key_scales,
            self.values,
            self.value_scales,
            index,
            self.bits,
            self.widths[1],
            scaling,
        )
        return output[None, :, None], lse[None, :, None]

    def units(self, kept: Tensor) -> Quantised:
        kept = kept.to(self.keys.device)
        keys = self.keys
        if self.keys_by == "channel":  # two blocks of 16 tokens are one unit
            blocks = codec.GROUP // codec.LANES
            keys = keys.unflatten(1, (-1, blocks)).index_select(1, kept).flatten(1, 2)
        else:
            keys = keys.index_select(1, kept)
        return replace(
            self,
            keys=keys,
            key_scales=self.key_scales.index_select(1, kept),
            values=self.values.index_select(1, kept),
            value_scales=self.value_scales.index_select(1, kept),
        )


@dataclass(frozen=True)
class Narrow(Store):
    """K and V ``[P, S, d]`` in a floating-point type of 8 bits."""

    keys: Tensor
    values: Tensor
    bits: int = 8
    unit: ClassVar[int] = 1

    @property
    def widths(self) -> tuple[int, int]:  # type: ignore[override]
        return self.keys.shape[2], self.values.shape[2]

    @staticmethod
    def of(keys: Tensor, values: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Narrow:
        """Round to ``dtype``; what is beyond it becomes its largest number.

        Raises
        ------
        ModelError
            If a number is not finite.
        """
        most = torch.finfo(dtype).max
        for x in (keys, values):
            if not bool(torch.isfinite(x).all()):
                raise ModelError("keys or values are not finite: run the model in fp32")
        keys, values = (x.float().clamp(-most, most).to(dtype) for x in (keys, values))
        return Narrow(keys, values)

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.keys.to(dtype), self.values.to(dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "keys", self.keys
        yield "values", self.values

    def head(self, number: int) -> Narrow:
        mine = slice(number, number + 1)
        return Narrow(self.keys[mine].clone(), self.values[mine].clone())

    def units(self, kept: Tensor) -> Narrow:
        kept = kept.to(self.keys.device)
        # Gathered as bytes: few devices gather 8-bit floats.
        keys, values = (
            x.view(torch.uint8).index_select(1, kept).view(x.dtype)
            for x in (self.keys, self.values)
        )
        return Narrow(keys, values)


@dataclass(frozen=True)
class Part:
    """What one sequence holds here for some of its KV heads.

    Attributes
    ----------
    first, heads : int
        The KV heads: ``heads`` from ``first`` on.
    index : Tensor
        ``[S]`` int32, each slot's token; -1 for a hole.
    store : Store
    dtype : torch.dtype
        Of the keys and values that went in.
    """

    first: int
    heads: int
    index: Tensor
    store: Store
    dtype: torch.dtype

    @cached_property
    def holes(self) -> bool:
        """Whether some slot holds no token."""
        return bool((self.index < 0).any())

    @cached_property
    def live(self) -> int:
        """Tokens held."""
        return int((self.index >= 0).sum())

    def alone(self, head: int) -> Part:
        """The part of one of its KV heads."""
        if self.heads == 1:
            return self
        return replace(self, first=head, heads=1, store=self.store.head(head - self.first))

    def keep(self, tokens: Tensor) -> Part | None:
        """The part without the slots that are not among ``tokens``; None if nothing is left."""
        kept = torch.isin(self.index, tokens.to(self.index))
        kept &= self.index >= 0
        if bool(kept.all()):
            return self
        if not bool(kept.any()):
            return None
        index = self.index.masked_fill(~kept, -1)
        unit = self.store.unit
        units = F.pad(kept, (0, -len(kept) % unit)).view(-1, unit).any(1)
        if bool(units.all()):
            return replace(self, index=index)
        left = torch.nonzero(units).flatten()
        slots = (left[:, None] * unit + torch.arange(unit, device=left.device)).flatten()
        slots = slots[slots < len(index)]
        return replace(self, index=index[slots].contiguous(), store=self.store.units(left))

    def attend(self, query: Tensor, scaling: float, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of ``[1, H', n, d]``: output, and log-sum-exp ``[1, H', n]``."""
        found = self.store.attend(query, scaling, self.index)
        if found is not None:
            return found
        keys, values = self.store.dense(query.dtype)
        mask = None
        if self.holes:
            index = F.pad(self.index, (0, keys.shape[1] - len(self.index)), value=-1)
            mask = Mask(index[None, None], rows.to(index.device))
        slots = len(self.index)
        output, lse = attend(
            query, keys[None], values[None], scaling, slots=slots, new=0, mask=mask, with_lse=True
        )
        if lse is None:
            raise RuntimeError("a part needs its log-sum-exp")
        return output, lse

    def read(self, head: int) -> tuple[Tensor, Tensor]:
        """K and V ``[S, d]`` of one of its KV heads, holes left out."""
        keys, values = self.store.dense(self.dtype)
        held = self.index >= 0
        count = len(self.index)
        mine = head - self.first
        return keys[mine, :count][held], values[mine, :count][held]


class PackedSegment(Segment):
    """Parts of a batch's sequences, written once; nothing here changes, so that forks share it.

    Parameters
    ----------
    rows : sequence of sequence of Part
        Per sequence; parts of one sequence are of different KV heads. A sequence may have none.
    kv_heads : int
    """

    def __init__(self, rows: Sequence[Sequence[Part]], kv_heads: int) -> None:
        self.rows = tuple(tuple(parts) for parts in rows)
        self.kv_heads = kv_heads

    def part(self, row: int, head: int) -> Part | None:
        """The part that holds a sequence's KV head, if one does."""
        return next(
            (part for part in self.rows[row] if part.first <= head < part.first + part.heads), None
        )

    @property
    def slots(self) -> int:
        return max((len(part.index) for parts in self.rows for part in parts), default=0)

    @property
    def heads_agree(self) -> bool:
        return all(part.heads == self.kv_heads for parts in self.rows for part in parts)

    def attend(
        self, query: Tensor, scaling: float, rows: Tensor, window: int | None, *, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, heads, n, _ = query.shape
        first = self.rows[0]
        if batch == 1 and len(first) == 1 and first[0].heads == self.kv_heads:
            return first[0].attend(query, scaling, rows)
        group = heads // self.kv_heads
        width = next(part.store.widths[1] for parts in self.rows for part in parts)
        output = query.new_zeros((batch, heads, n, width))
        lse = query.new_full((batch, heads, n), float("-inf"), dtype=torch.float32)
        # Everything here is older than the query rows: no row is hidden from any.
        for row, parts in enumerate(self.rows):
            for part in parts:
                mine = slice(part.first * group, (part.first + part.heads) * group)
                found, sums = part.attend(query[row : row + 1, mine], scaling, rows[row : row + 1])
                output[row, mine], lse[row, mine] = found[0], sums[0]
        return output, lse

    def held(self, row: int, head: int) -> Tensor:
        part = self.part(row, head)
        if part is None:
            return torch.empty(0, dtype=torch.long)
        return part.index[part.index >= 0].long().cpu()

    def read(self, row: int, head: int) -> tuple[Tensor, Tensor]:
        part = self.part(row, head)
        if part is not None:
            return part.read(head)
        some = next(part for parts in self.rows for part in parts)
        like = some.index.new_empty((), dtype=some.dtype)
        return tuple(like.new_empty((0, width)) for width in some.store.widths)  # type: ignore

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        counted: set[int] = set()
        for part in (part for parts in self.rows for part in parts):
            for kind, tensor in (*part.store.tensors(), ("index", part.index)):
                new = tensor.data_ptr() not in counted  # beams share what they have in common
                counted.add(tensor.data_ptr())
                yield kind, tensor, tensor.numel() * tensor.element_size() if new else 0

    def select_rows(self, rows: Tensor) -> PackedSegment:
        return PackedSegment([self.rows[row] for row in rows.tolist()], self.kv_heads)

    def keep(self, kept: Sequence[Sequence[Tensor]]) -> PackedSegment | None:
        """The segment with the tokens ``kept`` (see :data:`conduit_kv.cache.layer.Kept`) alone.

        Nothing is computed anew: slots become holes, and units without any token are freed. Where
        heads that lie together keep different tokens, their parts are cut apart.
        """
        rows = []
        for parts, heads in zip(self.rows, kept, strict=True):
            left = []
            for part in parts:
                if len(heads) == 1:
                    left.append(part.keep(heads[0]))
                else:
                    left += [
                        part.alone(head).keep(heads[head])
                        for head in range(part.first, part.first + part.heads)
                    ]
            rows.append([part for part in left if part is not None])
        return PackedSegment(rows, self.kv_heads) if any(rows) else None
