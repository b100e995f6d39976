"""Uniform: an even stride over the grid of each image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.budget import largest_remainder, share_out
from conduit_kv.errors import PlanError
from conduit_kv.layout import Layout
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import sinks_and_last
from conduit_kv.methods.evict.select import ranking
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class Uniform(EvictMethod):
    """Keep text, and visual tokens at an even stride over each image's grid: a control, ours.

    Text stays before any visual token; the first four tokens and the last one always stay; where a
    budget is less than the text, the text is thinned at an even stride. The visual tokens kept are
    shared over the images in proportion to what each has, and in an image over its frames. In a
    frame of ``R`` rows and ``C`` columns, ``n`` tokens lie on about ``sqrt(n R / C)`` rows evenly
    apart, in each row evenly apart; what an earlier turn has evicted is left out. All layers and
    heads keep the same tokens.

    Nothing is evicted in decoding.
    """

    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cover:
            raise PlanError(
                "uniform has no score that a share of the budget could go by: leave out cover"
            )

    def score(self, view: LayerView) -> Scores:
        return Scores(torch.zeros(view.size), sinks_and_last(view, view.layout.text.to(torch.int8)))

    def keep(self, view: LayerView, scores: Scores, budget: int) -> list[Tensor]:
        tier, budget = self._counted(view, scores, budget)
        order = ranking(scores.token, tier)
        levels = tier[order]
        kept = [order[levels > 1]]
        text, visual = order[levels == 1], order[levels == 0]
        room = max(budget - len(kept[0]), 0)
        kept.append(text[spread(min(room, len(text)), len(text))])
        kept += thinned(view.layout, visual, min(max(room - len(text), 0), len(visual)))
        return [torch.sort(torch.cat(kept)).values]


def thinned(layout: Layout, visual: Tensor, count: int) -> list[Tensor]:
    """``count`` of the tokens ``visual`` ``[N]``, image by image evenly over each grid."""
    owner = layout.image[visual]
    sizes = torch.bincount(owner, minlength=len(layout.grids)).tolist()
    shares = largest_remainder([s * count / max(len(visual), 1) for s in sizes], count)
    kept = []
    for image, mine in enumerate(shares):
        tokens = visual[owner == image]
        cells = layout.places[1:, tokens]
        # All layers hold the same tokens, and images are often of one size.
        kept.append(tokens[_remembered(cells.numpy().tobytes(), mine)])
    return kept


@lru_cache(maxsize=256)
def _remembered(cells: bytes, count: int) -> Tensor:
    grid = torch.frombuffer(bytearray(cells), dtype=torch.long) if cells else torch.empty(0).long()
    return spread_over_grid(grid.view(3, -1), count)


def spread(count: int, size: int) -> Tensor:
    """``[count]`` int64: places evenly apart among ``size``, as far from the ends as apart."""
    return (2 * torch.arange(count) + 1) * size // max(2 * count, 1)


def spread_over_grid(cells: Tensor, count: int) -> Tensor:
    """Choose ``count`` of some cells, evenly over the frames, rows and columns they lie in.

    Parameters
    ----------
    cells : Tensor
        ``[3, N]`` int64: frame, row and column.
    count : int
        At most ``N``.

    Returns
    -------
    Tensor
        ``[count]`` int64, which cells.
    """
    frame, row, column = cells
    frames, size = torch.unique(frame, return_counts=True)
    if not count:
        return torch.empty(0, dtype=torch.long)
    if count < len(frames):
        chosen = spread(count, len(frames))
        counts = dict.fromkeys(frames[chosen].tolist(), 1)
    else:
        shares = share_out(count, size.tolist(), size.tolist(), [1] * len(frames))
        counts = dict(zip(frames.tolist(), shares, strict=True))
    kept = []
    for number, mine in counts.items():
        inside = torch.nonzero(frame == number).flatten()
        kept.append(inside[_spread_over_rows(row[inside], column[inside], mine)])
    return torch.cat(kept)


def _spread_over_rows(row: Tensor, column: Tensor, count: int) -> Tensor:
    rows, size = torch.unique(row, return_counts=True)
    wanted = round(math.sqrt(count * len(rows) / int(size.max())))
    lines = min(max(wanted, 1), count, len(rows))
    while int(size[spread(lines, len(rows))].sum()) < count:
        lines += 1
    chosen = spread(lines, len(rows))
    room = size[chosen].tolist()
    kept = []
    for line, mine in zip(chosen.tolist(), share_out(count, room, room), strict=True):
        inside = torch.nonzero(row == rows[line]).flatten()
        inside = inside[torch.sort(column[inside], stable=True).indices]
        kept.append(inside[spread(mine, len(inside))])
    return torch.cat(kept)
