"""What a batch of sequences has seen: its logical length, whatever is still held of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conduit_kv.layout import Layout


@dataclass
class Progress:
    """What a batch of sequences has seen, shared by all layers of its cache.

    Logical and physical length are different things: this is the logical one.

    Attributes
    ----------
    seen : int
        Columns seen, padding included: what Transformers calls the sequence length.
    counts : list of int
        Real tokens of each sequence.
    layouts : list of Layout
        Of each sequence, over its real tokens.
    positions : list of list of Tensor
        Per sequence, its position ids ``[axes, n]`` chunk by chunk.
    next_position : list of int
        Of each sequence: the position that its next text token takes.
    step_tokens : Tensor
        ``[B, n]`` int32: the current step's tokens; -1 for padding.
    step_padded : bool
        Whether the current step has padding.
    turns, turn_start, turn_columns : int
        Steps of more than one column so far; where the newest of them began, and its columns.
    """

    seen: int = 0
    counts: list[int] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    positions: list[list[Tensor]] = field(default_factory=list)
    next_position: list[int] = field(default_factory=list)
    step_tokens: Tensor = field(default_factory=lambda: torch.empty((0, 0), dtype=torch.int32))
    step_padded: bool = False
    turns: int = 0
    turn_start: int = 0
    turn_columns: int = 0
    _padding: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return len(self.counts)

    @property
    def turn_stop(self) -> int:
        """Columns seen when the newest prefill or turn had come."""
        return self.turn_start + self.turn_columns

    def advance(
        self, valid: Tensor, layouts: Sequence[Layout], positions: Sequence[Tensor]
    ) -> None:
        """Take in a step's tokens.

        Parameters
        ----------
        valid : Tensor
            ``[B, n]`` bool, False for padding.
        layouts : sequence of Layout
            Of each sequence's new real tokens.
        positions : sequence of Tensor
            ``[axes, n_b]`` int64, their position ids.
        """
        if not self.counts:
            self.counts = [0] * len(valid)
            self.layouts = [Layout.text_only(0) for _ in valid]
            self.positions = [[] for _ in valid]
            self.next_position = [0] * len(valid)
        base = torch.tensor(self.counts, dtype=torch.long)[:, None]
        valid = valid.cpu()
        tokens = torch.where(valid, base + valid.long().cumsum(1) - 1, -1)
        self.step_padded = not bool(valid.all())
        if self.step_padded:
            self._padding.append((self.seen, valid))
        self.step_tokens = tokens.int()
        if valid.shape[1] > 1:
            self.turns += 1
            self.turn_start, self.turn_columns = self.seen, valid.shape[1]
        self.seen += valid.shape[1]
        for row, (layout, position) in enumerate(zip(layouts, positions, strict=True)):
            self.counts[row] += len(layout)
            self.layouts[row] = self.layouts[row].extend(layout)
            if position.numel():
                self.positions[row].append(position)
                self.next_position[row] = int(position.max()) + 1

    def copy(self) -> Progress:
        """A copy that goes its own way."""
        return replace(
            self,
            counts=list(self.counts),
            layouts=list(self.layouts),
            positions=[list(chunks) for chunks in self.positions],
            next_position=list(self.next_position),
            _padding=list(self._padding),
        )

    def last_tokens(self, columns: int) -> Tensor:
        """``[B, columns]`` int32: the tokens of the last columns; -1 for padding."""
        valid = torch.ones((self.batch, self.seen), dtype=torch.bool)
        for start, chunk in self._padding:
            valid[:, start : start + chunk.shape[1]] = chunk
        tokens = torch.where(valid, valid.long().cumsum(1) - 1, -1)
        return tokens[:, self.seen - columns :].int()

    def crop(self, columns: int) -> None:
        """Forget the last columns."""
        lost = (self.last_tokens(columns) >= 0).sum(1).tolist()
        self.seen -= columns
        self._padding = [
            (start, valid[:, : self.seen - start])
            for start, valid in self._padding
            if start < self.seen
        ]
        for row, count in enumerate(lost):
            self.counts[row] -= count
            self.layouts[row] = self.layouts[row].crop(self.counts[row])
            whole = self.position_ids(row)[:, : self.counts[row]]
            self.positions[row] = [whole]
            self.next_position[row] = int(whole.max()) + 1 if whole.numel() else 0

    def position_ids(self, row: int) -> Tensor:
        """``[axes, T]`` int64, the position ids of a sequence's tokens."""
        if not self.positions[row]:
            return torch.empty((1, 0), dtype=torch.long)
        return torch.cat(self.positions[row], dim=1)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep the batch's sequences ``rows``, which may repeat."""
        self.counts = [self.counts[row] for row in rows]
        self.layouts = [self.layouts[row] for row in rows]
        self.positions = [list(self.positions[row]) for row in rows]
        self.next_position = [self.next_position[row] for row in rows]
        self._padding = [(start, valid[list(rows)]) for start, valid in self._padding]
        if self.step_tokens.shape[0]:
            self.step_tokens = self.step_tokens[list(rows)]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held: its kind, itself, and its bytes."""
        held = [self.step_tokens, *(valid for _, valid in self._padding)]
        for layout in self.layouts:
            held.append(layout.places)
        for tensor in [*held, *(chunk for chunks in self.positions for chunk in chunks)]:
            yield "positions", tensor, tensor.numel() * tensor.element_size()
