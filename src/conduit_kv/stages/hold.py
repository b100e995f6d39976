"""Runs a hold method: packs each layer once, when the prefill or turn has been scored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.cache import Capsule, PackedSegment, Part, VisualCache, VisualLayer
from conduit_kv.cache.cache import borrowed
from conduit_kv.methods.hold.base import FULL_BITS, HoldMethod, Scene, Where
from conduit_kv.methods.hold.windowquant import WindowQuant

_PROBES = 8
"""The prompt's last rows, by which a layer's error is measured."""

Piece = tuple[list[int], Tensor, Tensor, Tensor]
"""KV heads that hold the same, their tokens ``[S]``, and K and V ``[P, S, d]``."""


@dataclass
class Holding:
    """The hold stage of one request.

    Attributes
    ----------
    method : HoldMethod or None
        None leaves everything as it is.
    cache : VisualCache
    guarded : dict
        Per layer and sequence: the error by which the outlier guard gave it one level more.
    decided_at : int
        Columns seen when a question last decided about bits.
    """

    method: HoldMethod | None
    cache: VisualCache
    guarded: dict[tuple[int, int], float] = field(default_factory=dict)
    decided_at: int = 0
    _windows: list[Tensor] = field(default_factory=list)
    _similarity: list[Tensor] = field(default_factory=list)
    _probes: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _scaling: float = 1.0
    _done: set[int] = field(default_factory=set)
    _looked_at: list[int] = field(default_factory=list)
    _turned: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _copies: dict[int, list[list[Piece]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache = borrowed(self.cache)

    @property
    def active(self) -> bool:
        """Whether anything is to be packed at all."""
        return self.method is not None and not self.method.is_identity

    def take_in(self, embeddings: Tensor) -> None:
        """Input embeddings ``[B, n, hidden]`` of a step that may bring images."""
        if not isinstance(self.method, WindowQuant) or not self.method.searches:
            return
        progress = self.cache.progress
        for row, layout in enumerate(progress.layouts):
            real = (progress.step_tokens[row] >= 0).to(embeddings.device)
            fresh = embeddings[row][real].float()
            windows = self.method.windows(layout)[len(layout) - len(fresh) :].to(fresh.device)
            text = F.normalize(fresh[windows < 0], dim=-1)
            if self.method.similarity == "mean":
                text = F.normalize(fresh[windows < 0].mean(0, keepdim=True), dim=-1)
            known = len(self._similarity[row]) if row < len(self._similarity) else 0
            count = int(windows.max()) + 1 - known if bool((windows >= 0).any()) else 0
            means = fresh.new_zeros((max(count, 0), fresh.shape[1]))
            if count > 0:
                mine = windows >= 0
                means.index_add_(0, windows[mine] - known, fresh[mine])
            self._add(row, F.normalize(means, dim=-1), text)

    def _add(self, row: int, means: Tensor, text: Tensor) -> None:
        """Compare a sequence's new windows, or with ``research`` all of them, with a text."""
        if row == len(self._similarity):
            self._similarity.append(torch.empty(0))
            self._windows.append(means[:0])
        if isinstance(self.method, WindowQuant) and self.method.research:
            means = self._windows[row] = torch.cat([self._windows[row], means])
            self._similarity[row] = (
                self._similarity[row][:0] if len(text) else self._similarity[row]
            )
            means = means[len(self._similarity[row]) :]
        if len(means):
            self.decided_at = self.cache.progress.seen
        found = means.new_zeros(len(means))
        if len(text) and len(means):
            found = (means @ text.T).amax(1).nan_to_num(0.0)
        self._similarity[row] = torch.cat([self._similarity[row], found.cpu()])

    def begin(self) -> None:
        """Before the first layer of a prefill or turn."""
        self._done, self._probes, self._turned = set(), {}, {}

    def observe(self, layer: int, queries: Tensor, scaling: float, *, at_once: bool) -> None:
        """After a layer has run the step's tokens.

        Parameters
        ----------
        queries : Tensor
            ``[B, H, n, d]`` of the step's columns, RoPE applied.
        at_once : bool
            Whether no other stage has to see the layer in full precision any more: then it is
            packed now, so that the whole cache is never there in full precision.
        """
        if self.cache.layers[layer].kind != "full" or self.method is None:
            return
        if self.method.guard:
            rows = []
            for row, tokens in enumerate(self.cache.progress.step_tokens):
                last = torch.nonzero(tokens >= 0).flatten()[-_PROBES:]
                rows.append((queries[row, :, last.to(queries.device)].clone(), tokens[last].cpu()))
            self._probes[layer], self._scaling = rows, scaling
        if at_once:
            self._pack(layer)

    def finish(self) -> None:
        """After the last layer, and after the evict stage: pack what is not packed yet."""
        for layer, held in enumerate(self.cache):
            if held.kind == "full" and layer not in self._done:
                self._pack(layer)
        self._probes, self._turned = {}, {}
        self._looked_at = list(self.cache.progress.counts)

    # -- packing one layer -------------------------------------------------------------------

    def _pack(self, layer: int) -> None:
        self._done.add(layer)
        held: VisualLayer = self.cache.layers[layer]
        method = self.method
        if method is None or held.tail is None:
            return
        research = isinstance(method, WindowQuant) and method.research
        packed: dict[int, list[list[Part]]] = {}
        copies: list[list[Piece]] = []
        for row in range(self.cache.progress.batch):
            copies.append([])
            for piece in self._pieces(layer, row, research):
                heads, tokens, keys, values = piece
                bits, parts = self._parts(layer, row, piece)
                for level, part in parts:
                    rows = packed.setdefault(level, [[] for _ in range(held.batch)])
                    rows[row].append(part)
                if research:
                    at = torch.nonzero(bits < FULL_BITS).flatten()
                    there = at.to(keys.device)
                    copies[row].append((heads, tokens[at], keys[:, there], values[:, there]))
        if research:
            self._copies[layer] = copies
            held.unpack()
        if packed:
            held.freeze([PackedSegment(rows, held.kv_heads) for _, rows in sorted(packed.items())])

    def _pieces(self, layer: int, row: int, research: bool) -> Iterator[Piece]:
        """What a layer holds of a sequence in full precision, heads that hold the same together."""
        held: VisualLayer = self.cache.layers[layer]
        every = list(range(held.kv_heads))
        for heads in [every] if held.heads_agree(row) else [[head] for head in every]:
            tokens, keys, values = held.read(row, heads, packed=False)
            if self._looked_at and not research:  # a token is looked at once
                new = torch.nonzero(tokens >= self._looked_at[row]).flatten()
                tokens, new = tokens[new], new.to(keys.device)
                keys, values = keys.index_select(1, new), values.index_select(1, new)
            if research and layer in self._copies:
                still = held.held(row, heads[0])
                for group, index, old_keys, old_values in self._copies[layer][row]:
                    mine = [group.index(head) for head in heads if head in group]
                    if not mine:
                        continue
                    at = torch.nonzero(torch.isin(index, still)).flatten()
                    there = at.to(keys.device)
                    tokens = torch.cat([tokens, index[at]])
                    keys = torch.cat([keys, old_keys[mine][:, there]], 1)
                    values = torch.cat([values, old_values[mine][:, there]], 1)
                tokens, order = tokens.sort()
                keys, values = (x[:, order.to(x.device)] for x in (keys, values))
            yield heads, tokens, keys, values

    def _parts(self, layer: int, row: int, piece: Piece) -> tuple[Tensor, list[tuple[int, Part]]]:
        """The bits of a piece's tokens, and its parts by bits."""
        method: HoldMethod = self.method  # type: ignore[assignment]
        layout = self.cache.progress.layouts[row]
        similar = partial(self._similarity.__getitem__, row)
        bits = method.bits_of(Scene(layout, similar), piece[1])
        parts = self._stored(layer, row, piece, bits)
        if method.guard and parts and layer in self._probes:
            error = self._error(layer, row, piece, parts)
            if error > method.guard:
                self.guarded[layer, row] = max(error, self.guarded.get((layer, row), 0.0))
                bits = method.more(bits)
                parts = self._stored(layer, row, piece, bits)
        return bits, parts

    def _stored(self, layer: int, row: int, piece: Piece, bits: Tensor) -> list[tuple[int, Part]]:
        method: HoldMethod = self.method  # type: ignore[assignment]
        heads, tokens, keys, values = piece
        parts = []
        for level in bits.unique().tolist():
            if level >= FULL_BITS:
                continue
            at = torch.nonzero(bits == level).flatten()
            there = at.to(keys.device)
            where = Where(layer, heads[0], self.cache.layers[layer].kv_heads, tokens[at],
                          partial(self._angles, row))  # fmt: skip
            store = method.store(
                keys.index_select(1, there), values.index_select(1, there), level, where
            )
            index = tokens[at].to(keys.device, torch.int32)
            parts.append((level, Part(heads[0], len(heads), index, store, keys.dtype)))
        return parts

    def _angles(self, row: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[S, d/2]`` of some tokens; all layers share what they have alike."""
        key = (row, int(tokens[0]), int(tokens[-1]), len(tokens))
        if key not in self._turned:
            if self.cache.rotary is None:
                raise RuntimeError("this cache was made without the model's rotary embedding")
            cos, sin = self.cache.rotary(self.cache.progress.position_ids(row))
            there = tokens.to(cos.device)
            self._turned[key] = cos[there].contiguous(), sin[there].contiguous()
        return self._turned[key]

    def _error(
        self, layer: int, row: int, piece: Piece, parts: Sequence[tuple[int, Part]]
    ) -> float:
        """Relative change of the attention output of the prompt's last rows, L2 over all heads."""
        heads, tokens, keys, values = piece
        queries, probes = self._probes[layer][row]
        group = queries.shape[0] // self.cache.layers[layer].kv_heads
        query = queries[heads[0] * group : (heads[-1] + 1) * group].float()
        query = query.reshape(len(heads), -1, query.shape[-1])
        hidden = (tokens[None] > probes[:, None]).repeat(group, 1).to(query.device)
        changed = [keys.float().clone(), values.float().clone()]
        for _, part in parts:
            at = torch.searchsorted(tokens, part.index.cpu().long()).to(query.device)
            for mine, new in zip(changed, part.store.dense(torch.float32), strict=True):
                mine[:, at] = new[:, : len(at)]

        def output(k: Tensor, v: Tensor) -> Tensor:
            logits = torch.bmm(query, k.transpose(1, 2)) * self._scaling
            return torch.bmm(logits.masked_fill(hidden, float("-inf")).softmax(-1), v)

        exact = output(keys.float(), values.float())
        return float((output(*changed) - exact).norm() / exact.norm().clamp_min(1e-30))

    # -- what is held, and copies of it ------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """What was done otherwise than the method's budget says, and why."""
        notes = []
        if self.guarded:
            layers = sorted({layer for layer, _ in self.guarded})
            notes.append(f"layers {layers} keep one level more: their attention changed too much")
        if self._copies:
            copied = sum(t.numel() * t.element_size() for kind, t, _ in self.tensors()
                         if kind == "copies")  # fmt: skip
            notes.append(f"research keeps {copied} bytes in full precision beside the packed cache")
        return notes

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held for later: its kind, itself, and its bytes."""
        copies = [
            tensor
            for rows in self._copies.values()
            for pieces in rows
            for piece in pieces
            for tensor in piece[1:]
        ]
        probes = [tensor for rows in self._probes.values() for pair in rows for tensor in pair]
        for kind, held in (
            ("features", [*self._windows, *self._similarity, *probes]),
            ("copies", copies),
        ):
            for tensor in held:
                yield kind, tensor, tensor.numel() * tensor.element_size()

    def fork(self, cache: VisualCache) -> Holding:
        """This stage's state for a fork of its cache."""
        return replace(
            self,
            cache=cache,
            guarded=dict(self.guarded),
            _windows=list(self._windows),
            _similarity=list(self._similarity),
            _probes=dict(self._probes),
            _done=set(self._done),
            _looked_at=list(self._looked_at),
            _copies=dict(self._copies),
        )

    def select_rows(self, rows: Sequence[int]) -> None:
        """Follow the cache when beams are reordered or sequences repeated."""
        if self._similarity:
            self._windows = [self._windows[row] for row in rows]
            self._similarity = [self._similarity[row] for row in rows]
        if self._looked_at:
            self._looked_at = [self._looked_at[row] for row in rows]
        self._copies = {
            layer: [copies[row] for row in rows] for layer, copies in self._copies.items()
        }
        self.guarded = {
            (layer, new): self.guarded[layer, old]
            for layer in {layer for layer, _ in self.guarded}
            for new, old in enumerate(rows)
            if (layer, old) in self.guarded
        }


def learned_bytes(cache: VisualCache) -> int:
    """Bytes of learned parts that the cache is read with: process memory, shared by requests."""
    parts = {
        id(part.store.parts.basis): part.store.parts.bytes()
        for layer in cache
        for segment in layer.frozen
        if isinstance(segment, PackedSegment)
        for part in (part for row in segment.rows for part in row)
        if isinstance(part.store, Capsule)
    }
    return sum(parts.values())


def held_bits(cache: VisualCache, row: int) -> Iterator[tuple[int, Tensor]]:
    """In how many bits a sequence's tokens are held, by layer and KV head; none if none is packed.

    Yields
    ------
    layer : int
    bits : Tensor
        ``[T]`` fp64, payload bits per number without scales and zeros: 16 for a token in the
        model's own type, 0 for one that the head does not hold.
    """
    if not any(isinstance(segment, PackedSegment) for layer in cache for segment in layer.frozen):
        return
    for number, layer in enumerate(cache):
        for head in range(layer.kv_heads):
            bits = torch.zeros(len(cache.progress.layouts[row]), dtype=torch.float64)
            bits[layer.held(row, head)] = FULL_BITS
            for segment in layer.frozen:
                part = segment.part(row, head) if isinstance(segment, PackedSegment) else None
                if part is not None:
                    bits[segment.held(row, head)] = part.store.bits
            yield number, bits


def average_bits(cache: VisualCache) -> float | None:
    """:func:`held_bits` of the visual tokens held, mean over layers and heads, or None."""
    total, tokens = 0.0, 0
    for row, layout in enumerate(cache.progress.layouts):
        for _, bits in held_bits(cache, row):
            visual = bits[layout.visual]
            total += float(visual.sum())
            tokens += int((visual > 0).sum())
    return total / tokens if tokens else None
