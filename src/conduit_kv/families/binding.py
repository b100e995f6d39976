"""Bind the images and videos of a batch to the sequences that name them.

Processors give all images of a batch one after another. Which sequence an image belongs to follows
from the placeholder tokens alone, in order of appearance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from conduit_kv.errors import InputError
from conduit_kv.layout import Grid

IMAGE, VIDEO = 1, 2
"""Kinds of placeholder tokens, as in Transformers' ``mm_token_type_ids``; text is 0."""

_NAMES = {IMAGE: "image", VIDEO: "video"}


def bind(
    kinds: Sequence[Tensor], grids: Mapping[int, Sequence[Grid]], *, complete: bool = True
) -> list[list[Grid]]:
    """Hand each sequence its images and videos, in order of appearance.

    Parameters
    ----------
    kinds : sequence of Tensor
        ``[T_b]`` int64 of each sequence: 0 for text, :data:`IMAGE` or :data:`VIDEO` for
        placeholders.
    grids : mapping
        For each kind, the grids of the whole batch in the processor's order.
    complete : bool
        Whether every grid must find its placeholders.

    Returns
    -------
    list of list of Grid
        One list per sequence.

    Raises
    ------
    InputError
        If placeholders and images disagree in number; the message names both counts.
    """
    taken = dict.fromkeys(grids, 0)
    bound: list[list[Grid]] = []
    for row in kinds:
        visual = row[row > 0].tolist()
        mine: list[Grid] = []
        place = 0
        while place < len(visual):
            kind = visual[place]
            queue = grids.get(kind, ())
            if taken.get(kind, 0) >= len(queue):
                raise _mismatch(kinds, grids, kind)
            grid = queue[taken[kind]]
            if visual[place : place + grid.tokens].count(kind) < grid.tokens:
                raise _mismatch(kinds, grids, kind)
            taken[kind] += 1
            place += grid.tokens
            mine.append(grid)
        bound.append(mine)
    if complete:
        for kind, queue in grids.items():
            if taken[kind] < len(queue):
                raise _mismatch(kinds, grids, kind)
    return bound


def _mismatch(
    kinds: Sequence[Tensor], grids: Mapping[int, Sequence[Grid]], kind: int
) -> InputError:
    name = _NAMES[kind]
    found = [int((row == kind).sum()) for row in kinds]
    queue = grids.get(kind, ())
    per_sequence = f" ({' + '.join(map(str, found))} by sequence)" if len(found) > 1 else ""
    return InputError(
        f"the prompt has {sum(found)} {name} placeholder tokens{per_sequence} but its {len(queue)} "
        f"{name}(s) give {sum(grid.tokens for grid in queue)}: pass exactly the {name}s that the "
        "prompt names, in order"
    )


def runs(mask: Tensor) -> list[tuple[int, int]]:
    """Start and end of each run of True in ``mask`` ``[T]`` bool."""
    values, lengths = torch.unique_consecutive(mask.cpu(), return_counts=True)
    ends = lengths.cumsum(0).tolist()
    return [
        (end - length, end)
        for value, length, end in zip(values.tolist(), lengths.tolist(), ends, strict=True)
        if value
    ]


def pair(value: Any) -> tuple[int, int]:
    """A size in a configuration, one number or (height, width), as (height, width)."""
    if isinstance(value, (list, tuple)):
        return int(value[0]), int(value[1])
    return int(value), int(value)
