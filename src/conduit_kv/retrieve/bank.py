"""The images of a request as stored entries, and the places that chosen tokens take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from conduit_kv.cache import codec
from conduit_kv.layout import Layout
from conduit_kv.reuse.entry import Entry
from conduit_kv.reuse.held import Held

Part = tuple[Literal["keys", "values", "features"], int | None]
"""What a method ranks by: K or V of one layer, or what the image encoder gave."""
Source = Held | Callable[[], Entry]
"""Where a unit's entry comes from: it is held, packed or not, or fetched each time."""


@dataclass(frozen=True)
class _Coarse:
    """What ranks a unit, in 8 bits: scores of it decide an order, not what is attended to."""

    words: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(part: Tensor) -> _Coarse:
        """``[..., n, d]``, each token by itself."""
        rows = part.unsqueeze(0) if part.dim() == 2 else part
        return _Coarse(*codec.encode_by_token(rows, 8), part.shape, part.dtype)

    def dense(self) -> Tensor:
        """``[..., n, d]``."""
        width, count = self.shape[-1], self.shape[-2]
        rows = codec.decode_by_token(self.words, self.scales, 8, width, self.dtype)
        return rows[:, :count].reshape(self.shape)


@dataclass
class Bank:
    """The visual tokens of a request, unit by unit: what a question may choose from.

    A unit is what was prefilled alone: an image, or a group of a video's frames. A candidate is a
    visual token; candidates count from 0 over all units in the order of the sequence.

    A unit's entry is held, packed or not, or it stays where it is stored: then only what ranks it
    is held, in 8 bits, and the entry is fetched when a question has chosen it.

    Attributes
    ----------
    tokens : list of Tensor
        Per unit, ``[n]`` int64: where its candidates lie in the sequence.
    images : list of int
        The image of the sequence's layout that each unit is, or is a part of.
    positions : list of Tensor
        Per unit, ``[axes, n]`` int64: the positions that it was prefilled at.
    bytes_per_token : int
        K and V of one token in all layers.
    """

    tokens: list[Tensor] = field(default_factory=list)
    images: list[int] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    bytes_per_token: int = 0
    _sources: list[Source] = field(default_factory=list)
    _parts: list[dict[Part, _Coarse]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def size(self) -> int:
        """``N``, candidates of all units."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def unit(self) -> Tensor:
        """``[N]`` int64, the unit of each candidate."""
        sizes = torch.tensor([len(tokens) for tokens in self.tokens], dtype=torch.long)
        return torch.repeat_interleave(torch.arange(len(self)), sizes)

    @property
    def places(self) -> Tensor:
        """``[N]`` int64, where each candidate lies in the sequence; ascending."""
        return torch.cat(self.tokens) if self.tokens else torch.empty(0, dtype=torch.long)

    def add(
        self, entry: Entry, tokens: Tensor, image: int, source: Source, reads: Sequence[Part] = ()
    ) -> None:
        """One more unit, after all others.

        Parameters
        ----------
        entry : Entry
            As ``source`` gives it.
        source : Held or callable
            The entry as it is held, or what fetches it.
        reads : sequence of Part
            What is held of an entry that is fetched or unpacked.
        """
        self.tokens.append(tokens)
        self.images.append(image)
        self.positions.append(entry.positions.cpu())
        keys = entry.keys
        self.bytes_per_token = 2 * keys[:, :, 0].numel() * keys.element_size()
        self._sources.append(source)
        self._parts.append(
            {} if _is_whole(source) else {part: _Coarse.of(_part(entry, part)) for part in reads}
        )

    def entry(self, unit: int) -> Entry:
        """A unit's entry, fetched or unpacked where it is not held as it is."""
        source = self._sources[unit]
        return source.entry() if isinstance(source, Held) else source()

    def part(self, unit: int, part: Part) -> Tensor:
        """``[G, n, d]`` or ``[n, D]``: what a unit is ranked by; held from then on."""
        if _is_whole(self._sources[unit]):
            return _part(self.entry(unit), part)
        if part not in self._parts[unit]:
            self._parts[unit][part] = _Coarse.of(_part(self.entry(unit), part))
        return self._parts[unit][part].dense()

    def parts(self, chosen: Tensor) -> list[tuple[int, Tensor]]:
        """Units with some of candidates ``chosen`` ``[n]`` ascending, and which of the unit's."""
        found, start = [], 0
        for unit, tokens in enumerate(self.tokens):
            stop = start + len(tokens)
            mine = chosen[(chosen >= start) & (chosen < stop)] - start
            if len(mine):
                found.append((unit, mine))
            start = stop
        return found

    def gather(self, chosen: Tensor, layer: int | None = None) -> tuple[Tensor, Tensor]:
        """Position-free keys, and values, of candidates: ``[L, G, n, d]``, or of one layer."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for unit, mine in self.parts(chosen):
            entry = self.entry(unit)
            at = mine.to(entry.keys.device)
            whole = len(mine) == entry.tokens
            for store, tensor in ((keys, entry.keys), (values, entry.values)):
                part = tensor if layer is None else tensor[layer]
                store.append(part if whole else part.index_select(-2, at))
        return torch.cat(keys, dim=-2), torch.cat(values, dim=-2)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor held: its kind, and itself."""
        for source, parts in zip(self._sources, self._parts, strict=True):
            held = source.tensors.values() if isinstance(source, Held) else ()
            coarse = (tensor for part in parts.values() for tensor in (part.words, part.scales))
            for tensor in (*held, *coarse):
                yield "entries", tensor
        for tensor in (*self.tokens, *self.positions):
            yield "positions", tensor

    def copy(self) -> Bank:
        """A bank that goes its own way; entries are shared, nobody writes to them."""
        return replace(
            self,
            tokens=list(self.tokens),
            images=list(self.images),
            positions=list(self.positions),
            _sources=list(self._sources),
            _parts=list(self._parts),
        )


def _is_whole(source: Source) -> bool:
    """Whether an entry is held as it was computed, so that reading it costs nothing."""
    return isinstance(source, Held) and source.method.is_identity


def _part(entry: Entry, part: Part) -> Tensor:
    name, layer = part
    tensor: Tensor = getattr(entry, name)
    return tensor if layer is None else tensor[layer]


def contiguous_positions(layout: Layout, positions: Tensor, visible: Tensor) -> Tensor:
    """New positions of the visible tokens, as if the others had never been there.

    With one axis they count on. With M-RoPE a run of an image's tokens keeps its shape: it begins
    where the text before it ends, its frames take the first of the run's own times, and the text
    after it begins one beyond the largest position. With everything visible they are the old ones.

    Parameters
    ----------
    layout : Layout
        Of all ``T`` tokens.
    positions : Tensor
        ``[axes, T]`` int64.
    visible : Tensor
        ``[V]`` int64 ascending.

    Returns
    -------
    Tensor
        ``[axes, V]`` int64.
    """
    if positions.shape[0] == 1:
        return torch.arange(len(visible))[None]
    image = layout.image
    starts = torch.ones(len(image), dtype=torch.bool)
    starts[1:] = image[1:] != image[:-1]
    run_of = starts.long().cumsum(0) - 1  # of every token
    found, cursor = [], 0
    for run in run_of[visible].unique_consecutive().tolist():
        mine = visible[run_of[visible] == run]
        if image[mine[0]] < 0:
            part = (torch.arange(len(mine)) + cursor).expand(positions.shape[0], -1)
        else:
            whole = torch.nonzero(run_of == run).flatten()
            old = positions[:, whole]
            part = positions[:, mine] - old.amin(1, keepdim=True)
            times = old[0].unique() - old[0].min()
            kept = part[0].unique()  # the times of the frames that are visible
            part = torch.cat([times[torch.searchsorted(kept, part[0])][None], part[1:]])
            part = part + cursor
        found.append(part)
        cursor = int(part.max()) + 1
    return torch.cat(found, dim=1)
