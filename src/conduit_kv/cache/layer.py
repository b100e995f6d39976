"""One decoder layer's share of a request's cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from conduit_kv.attention.merge import merge_parts
from conduit_kv.cache.packed import PackedSegment
from conduit_kv.cache.segments import DenseSegment, RaggedSegment, Segment
from conduit_kv.errors import PlanError

if TYPE_CHECKING:
    from conduit_kv.cache.progress import Progress

Kept = Sequence[Sequence[Tensor]]
"""Per sequence, per KV head (or one for all heads): ``[n]`` int64 tokens, ascending."""
_Snapshot = tuple[list[Segment], DenseSegment | None, int, int, list[int], tuple[int, int]]


def crop_count(tokens_to_remove: int) -> int:
    """How many tokens ``crop`` takes back: Transformers counts them as a negative number.

    Raises
    ------
    PlanError
        If the number is positive: older releases meant the length that is left.
    """
    if tokens_to_remove > 0:
        raise PlanError(f"crop({tokens_to_remove}): write crop(-n) to take back the last n tokens")
    return -int(tokens_to_remove)


class VisualLayer(CacheLayerMixin):  # type: ignore[misc]
    """What a layer holds: frozen segments, and a dense tail that new tokens are appended to.

    Parameters
    ----------
    progress : Progress
        What the request has seen, shared by all layers.
    kind : {"full", "sliding"}
        Sliding layers are left alone by every method.

    Attributes
    ----------
    skipped : list of int
        Per sequence, tokens that did not run in this layer; empty if all of them did.
    work : tuple of int
        Of the newest prefill or turn, over the batch with its padding: rows that ran, and keys
        that they saw in all.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, progress: Progress, kind: str = "full") -> None:
        super().__init__()
        self.progress = progress
        self.kind = kind
        self.frozen: list[Segment] = []
        self.tail: DenseSegment | None = None
        self.skipped: list[int] = []
        self.work = (0, 0)
        self._turn = 0  # of which turn the work was
        self._columns = 0  # seen so far, padding included
        self._first: int | None = None  # of the tokens that lie open

    # -- Transformers' cache-layer contract --------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.tail = DenseSegment.empty(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the step's tokens; attention reads the segments, not what is returned.

        Raises
        ------
        PlanError
            If they were not announced: a plain model would attend to what is returned alone.
        """
        if self._first is not None:
            self._rewrite(key_states, value_states)
            return key_states, value_states
        self._columns += key_states.shape[2]
        if self._columns > self.progress.seen:
            self._columns -= key_states.shape[2]
            raise PlanError(
                "this cache was made under compress() and can be continued only under it: run the "
                "model inside a with block of the same plan"
            )
        if self.tail is None:
            self.lazy_initialization(key_states, value_states)
        tail: DenseSegment = self.tail  # type: ignore[assignment]
        if self.progress.seen == self.progress.turn_stop:
            batch, new = key_states.shape[0], key_states.shape[2]
            self._count(batch * new, batch * (new * self.slots + new * (new + 1) // 2))
        tail.append(key_states, value_states, self.progress.step_tokens, self.progress.step_padded)
        return key_states, value_states

    def _count(self, rows: int, pairs: int) -> None:
        before = self.work if self._turn == self.progress.turns else (0, 0)
        self.work, self._turn = (before[0] + rows, before[1] + pairs), self.progress.turns

    def open(self, keys: Tensor, values: Tensor, tokens: Tensor) -> None:
        """Lay the step's tokens ``[n]`` out before they run: K and V ``[1, G, n, d]``.

        Until :meth:`close`, a token that runs overwrites its K and V where they lie. What has not
        run yet is seen as it was laid out, so that text must run before anything that follows it.
        """
        if self.tail is None:
            self.lazy_initialization(keys, values)
        tail: DenseSegment = self.tail  # type: ignore[assignment]
        tail.append(keys, values, tokens[None].to(keys.device, torch.int32), False)
        tail.open = True
        self._columns += len(tokens)
        self._first = int(tokens[0])

    def close(self) -> None:
        """All of the step's tokens are as they will stay."""
        self._first = None
        if self.tail is not None:
            self.tail.open = False

    def newest(self, count: int) -> Tensor:
        """``[G, count, d]``, the values of the first sequence's last tokens."""
        tail: DenseSegment = self.tail  # type: ignore[assignment]
        return tail.values[0][:, tail.length - count :]

    def _rewrite(self, keys: Tensor, values: Tensor) -> None:
        tail: DenseSegment = self.tail  # type: ignore[assignment]
        step = self.progress.counts[0] - (self._first or 0)
        place = self.progress.step_tokens[0].long() - (self._first or 0)
        self._count(len(place), int((place + 1).sum()) + len(place) * (self.slots - step))
        tail.write(place.to(keys.device) + (tail.length - step), keys, values)

    def get_seq_length(self) -> int:
        return self.progress.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.progress.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.frozen, self.tail, self.is_initialized = [], None, False
        self.skipped, self._columns, self._first = [], 0, None
        self.work, self._turn = (0, 0), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.tail is not None:
            rows = torch.arange(self.batch, device=self.tail.keys.device)
            self.select_rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select_rows(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every sequence.

        Raises
        ------
        PlanError
            If some of them were evicted: their neighbours cannot be told apart from them any more.
        """
        count = crop_count(tokens_to_remove)
        self.check_crop(count)
        if count and self.tail is not None:
            self.tail.crop(count)
            self._columns -= count

    def check_crop(self, count: int) -> None:
        """Raise PlanError if the last ``count`` tokens cannot be taken back."""
        if count == 0 or self.tail is None:
            return
        if self.tail.length < count or not self._tail_is_last(count):
            raise PlanError(
                f"cannot take back {count} tokens: the plan has acted on them in some layer. Take "
                "back fewer, or decode under a plan that neither removes nor packs"
            )

    def skip(self, columns: int, tokens: Sequence[int]) -> None:
        """Some of the step's columns do not run here: so many, and so many tokens per sequence."""
        if self._first is not None:
            return  # they are laid out here all the same
        self._columns += columns
        before = self.skipped or [0] * len(tokens)
        self.skipped = [old + new for old, new in zip(before, tokens, strict=True)]

    def reached(self, row: int) -> int:
        """Tokens of a sequence that ran in this layer so far, whether they are held or not."""
        return self.progress.counts[row] - (self.skipped[row] if self.skipped else 0)

    # -- what a request's other parts use -----------------------------------------------------

    @property
    def segments(self) -> list[Segment]:
        """All segments, oldest first."""
        return [*self.frozen, self.tail] if self.tail is not None else list(self.frozen)

    @property
    def batch(self) -> int:
        """Sequences in the batch; 0 before the first token."""
        return 0 if self.tail is None else int(self.tail.keys.shape[0])

    @property
    def slots(self) -> int:
        """Slots attended per sequence and head."""
        return sum(segment.slots for segment in self.segments)

    @property
    def kv_heads(self) -> int:
        return 0 if self.tail is None else int(self.tail.keys.shape[1])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all KV heads together; 0 before the first token."""
        if self.tail is None:
            return 0
        tensors = (self.tail.keys, self.tail.values)
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors)

    def _tail_is_last(self, count: int) -> bool:
        tail: DenseSegment = self.tail  # type: ignore[assignment]
        wanted = self.progress.last_tokens(count).to(tail.index.device)
        return bool((tail.index[:, :, tail.length - count :] == wanted[:, None]).all())

    def attend(self, query: Tensor, scaling: float, window: int | None) -> Tensor:
        """``[B, H, n, d]``: attention of the step's rows over all that the layer holds."""
        rows = self.progress.step_tokens
        segments = [segment for segment in self.segments if segment.slots]
        parts = [
            segment.attend(query, scaling, rows, window, with_lse=len(segments) > 1)
            for segment in segments
        ]
        if len(parts) == 1:
            return parts[0][0]
        return merge_parts([(output, lse) for output, lse in parts if lse is not None])

    def heads_agree(self, row: int) -> bool:
        """Whether all KV heads of a sequence hold the same tokens."""
        return self.tail is not None and all(segment.heads_agree for segment in self.segments)

    def held(self, row: int, head: int) -> Tensor:
        """``[S]`` int64 ascending: the tokens that a sequence's KV head holds."""
        return _in_order(self.segments, row, head)[0]

    def read(
        self, row: int, heads: Sequence[int], *, packed: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens ``[S]`` ascending and K, V ``[G', S, d]`` of KV heads that hold the same.

        Parameters
        ----------
        packed : bool
            False leaves out what :meth:`freeze` has packed; what is packed is read as numbers of
            the model's own type.
        """
        segments = self.segments if packed else self._loose
        tokens, order = _in_order(segments, row, heads[0])
        if len(segments) == 1 and self.tail is not None and not self.tail.holes and not self.frozen:
            keys, values = self.tail.keys[row], self.tail.values[row]
            if len(heads) != self.kv_heads:
                keys, values = keys[list(heads)], values[list(heads)]
            return tokens, keys, values
        pairs = [[segment.read(row, head) for segment in segments] for head in heads]
        keys = torch.stack([torch.cat([k for k, _ in head]) for head in pairs])
        values = torch.stack([torch.cat([v for _, v in head]) for head in pairs])
        if order is not None:
            order = order.to(keys.device)
            keys, values = keys.index_select(1, order), values.index_select(1, order)
        return tokens, keys, values

    @property
    def _loose(self) -> list[Segment]:
        return [segment for segment in self.segments if not isinstance(segment, PackedSegment)]

    def keep(self, kept: Kept, changed: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        """Hold ``kept`` and nothing else.

        Parameters
        ----------
        kept : sequence of sequence of Tensor
            See :data:`Kept`.
        changed : dict
            For some sequences, K and V ``[G, S, d]`` of all tokens held, in ascending order, to
            take instead of those stored (LOOK-M folds evicted tokens into kept ones). What is
            packed is never packed anew, and stays as it is.
        """
        tail: DenseSegment = self.tail  # type: ignore[assignment]
        packed = [s.keep(kept) for s in self.frozen if isinstance(s, PackedSegment)]
        agree = all(len(heads) == 1 for heads in kept)
        rows: list[list[tuple[Tensor, Tensor, Tensor]]] = []
        for row, heads in enumerate(kept):
            parts = []
            alike = len(heads) == 1 and self.heads_agree(row)
            for group in self._head_groups(alike):
                tokens = heads[0 if len(heads) == 1 else group[0]]
                held, keys, values = self.read(row, group, packed=not packed)
                if packed:
                    tokens = tokens[torch.isin(tokens, held)]
                if changed and row in changed:
                    everything = self.held(row, group[0]) if packed else held
                    at = torch.searchsorted(everything, held).to(keys.device)
                    keys, values = (x[group].index_select(1, at) for x in changed[row])
                at = torch.searchsorted(held, tokens).to(keys.device)
                keys, values = keys.index_select(1, at), values.index_select(1, at)
                tokens = tokens.to(keys.device, dtype=torch.int32)
                parts += [(k, v, tokens) for k, v in zip(keys, values, strict=True)]
            rows.append(parts)
        if any(len({len(part[2]) for part in parts}) > 1 for parts in rows):
            loose: list[Segment] = [RaggedSegment(rows)]
            self.tail = DenseSegment.empty(tail.keys, tail.values)
        else:
            loose = []
            self.tail = self._dense(rows, agree, tail)
        self.frozen = [segment for segment in packed if segment is not None] + loose

    def freeze(self, segments: Sequence[PackedSegment]) -> None:
        """Hold packed segments in place of the same tokens in full precision.

        The tokens that are left are written into new buffers, so that nothing of what was packed
        outlives it.
        """
        alike = all(segment.heads_agree for segment in (*self.segments, *segments))
        kept = []
        for row in range(self.batch):
            heads = []
            for group in self._head_groups(alike):
                held = self.held(row, group[0])
                for segment in segments:
                    held = held[~torch.isin(held, segment.held(row, group[0]))]
                heads.append(held)
            kept.append(heads)
        self.keep(kept)
        self.frozen = [*self.frozen, *segments]

    def unpack(self) -> None:
        """Forget all packed segments; who calls this packs their tokens anew from a copy."""
        self.frozen = [s for s in self.frozen if not isinstance(s, PackedSegment)]

    def head_groups(self, row: int) -> list[list[int]]:
        """KV heads of a sequence: all together if they hold the same tokens, else one by one."""
        return self._head_groups(self.heads_agree(row))

    def _head_groups(self, alike: bool) -> list[list[int]]:
        """All KV heads together if they are alike, else one by one."""
        heads = list(range(self.kv_heads))
        return [heads] if alike else [[head] for head in heads]

    def _dense(
        self, rows: list[list[tuple[Tensor, Tensor, Tensor]]], agree: bool, like: DenseSegment
    ) -> DenseSegment:
        longest = max(len(part[2]) for parts in rows for part in parts)
        shortest = min(len(part[2]) for parts in rows for part in parts)
        fresh = DenseSegment.empty(like.keys, like.values, 1 if agree else self.kv_heads)
        keys = fresh.keys.new_zeros((len(rows), self.kv_heads, longest, like.keys.shape[3]))
        values = fresh.values.new_zeros((len(rows), self.kv_heads, longest, like.values.shape[3]))
        index = torch.full(
            (len(rows), 1 if agree else self.kv_heads, longest),
            -1,
            dtype=torch.int32,
            device=keys.device,
        )
        for row, parts in enumerate(rows):
            for head, (key, value, tokens) in enumerate(parts):
                size = len(tokens)
                keys[row, head, longest - size :] = key
                values[row, head, longest - size :] = value
                if head < index.shape[1]:
                    index[row, head, longest - size :] = tokens
        return DenseSegment(keys, values, index, longest, shortest < longest)

    def drop(self, tokens: Sequence[Tensor]) -> None:
        """Drop ``tokens[row]`` (all KV heads alike) after a decoding step."""
        tail: DenseSegment = self.tail  # type: ignore[assignment]
        if len(tokens) == 1 and not self.frozen and tail.heads_agree and not tail.holes:
            slots = torch.searchsorted(tail.held(0, 0), tokens[0].sort().values)
            if len(slots):
                tail.remove(slots)
            return
        kept = []
        for row in range(self.batch):
            heads = [0] if self.heads_agree(row) else range(self.kv_heads)
            kept.append(
                [
                    held[~torch.isin(held, tokens[row])]
                    for held in (self.held(row, h) for h in heads)
                ]
            )
        self.keep(kept)

    def snapshot(self) -> _Snapshot:
        """What :meth:`restore` needs to forget tokens appended from now on."""
        length = 0 if self.tail is None else self.tail.length
        return list(self.frozen), self.tail, length, self._columns, self.skipped, self.work

    def restore(self, state: _Snapshot) -> None:
        """Go back to a :meth:`snapshot`."""
        self.frozen, self.tail, length, self._columns, self.skipped, self.work = state
        self._turn = 0
        self.is_initialized = self.tail is not None
        self.close()
        if self.tail is not None:
            self.tail.crop(self.tail.length - length)

    def share(self, other: VisualLayer, *, copy_tail: bool) -> None:
        """Hold what ``other`` holds. Without ``copy_tail`` nothing may be appended here."""
        self.frozen = list(other.frozen)
        self.is_initialized, self._columns = other.is_initialized, other._columns
        self.skipped, self.work, self._turn = other.skipped, other.work, other._turn
        if other.tail is not None:
            self.tail = other.tail.copy() if copy_tail else other.tail

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch's sequences ``rows``, which may repeat."""
        if self.tail is None:
            return
        rows = rows.to(self.tail.keys.device)
        self.frozen = [segment.select_rows(rows) for segment in self.frozen]
        self.tail = self.tail.select_rows(rows)
        if self.skipped:
            self.skipped = [self.skipped[row] for row in rows.tolist()]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held: its kind, itself, and the bytes of it in use."""
        for segment in self.segments:
            yield from segment.tensors()


def _in_order(segments: Sequence[Segment], row: int, head: int) -> tuple[Tensor, Tensor | None]:
    """Tokens that segments hold, ascending, and the order that makes them so if it is needed."""
    parts = [segment.held(row, head) for segment in segments]
    if len(segments) == 1 and isinstance(segments[0], DenseSegment):
        return parts[0], None  # its slots lie in the order of the sequence
    tokens = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)
    if len(tokens) < 2 or bool((tokens.diff() > 0).all()):
        return tokens, None
    tokens, order = tokens.sort()
    return tokens, order
