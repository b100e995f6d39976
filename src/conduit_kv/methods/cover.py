"""Orders of visual tokens whose every prefix covers the images.

Score-based eviction keeps what one question asks for; the next question may ask for something else.
With ``cover=x`` an evict method gives a share of its budget to tokens in one of these orders.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.layout import Grid, Layout

_TABLE = 4096  # points whose pairwise products are computed at once: at most 64 MB of fp32


def farthest_first(points: Tensor, groups: Tensor) -> Tensor:
    """Rank points so that every prefix lies spread out, in each group by itself.

    In a group the first is the point nearest to the group's mean, the next always the point
    farthest (Euclidean) from those taken so far: the greedy order of k-centre, at most twice as far
    from any point as the best choice of as many. Groups take turns in proportion to their size: the
    ``p``-th of ``n`` comes at ``(p + 1/2) / n`` of the whole. Ties go to the lower group, and in a
    group to the lower index.

    Parameters
    ----------
    points : Tensor
        ``[N, D]``, places or features.
    groups : Tensor
        ``[N]`` int64, the image of each point.

    Returns
    -------
    Tensor
        ``[N]`` int64 on the CPU: 0 for the point that comes first.
    """
    groups = groups.cpu()
    due = torch.zeros(len(groups), dtype=torch.float64)
    for group in torch.unique(groups).tolist():
        mine = torch.nonzero(groups == group).flatten()
        order = _greedy(points[mine.to(points.device)])
        due[mine[order]] = (torch.arange(len(mine), dtype=torch.float64) + 0.5) / len(mine)
    by_group = torch.sort(groups, stable=True).indices
    order = by_group[torch.sort(due[by_group], stable=True).indices]
    rank = torch.empty_like(groups)
    rank[order] = torch.arange(len(groups))
    return rank


def _greedy(points: Tensor) -> Tensor:
    """``[N]`` int64: indices of one group's points, each farthest from those before it."""
    points = points if points.dtype == torch.float64 else points.float()
    count = len(points)
    table = (points @ points.T).cpu() if count <= _TABLE else None
    length = points.square().sum(1).cpu()
    mean = points.mean(0)
    to_mean = length - 2 * (points @ mean).cpu()
    order = torch.empty(count, dtype=torch.long)
    distance = torch.full((count,), torch.inf, dtype=length.dtype)
    taken = to_mean.argmin()
    for place in range(count):
        order[place] = taken
        product = table[taken] if table is not None else (points @ points[taken]).cpu()
        distance = torch.minimum(distance, (length + length[taken] - 2 * product).clamp(min=0))
        distance[taken] = -1
        taken = distance.argmax()
    return order


@functools.lru_cache(maxsize=256)
def _grid_order(grid: Grid) -> Tensor:
    """``[tokens]`` int64: indices of an image's tokens, each farthest from those before it."""
    return _greedy(grid.cells().T.double())


def cover_ranks(layout: Layout, features: Tensor | None = None) -> Tensor:
    """Rank the tokens of a sequence so that the first visual ones cover its images.

    Parameters
    ----------
    layout : Layout
        Of the whole sequence, so that the order does not change with what a layer still holds.
    features : Tensor or None
        ``[T, D]``, the tokens' input embeddings: visual tokens are then spread by the cosine of
        their features (their norms differ too much for a distance to mean likeness). None: by
        their places, frame, row and column of the grid, one cell apart in each.

    Returns
    -------
    Tensor
        ``[T]`` int64, a permutation; text comes after all visual tokens.
    """
    rank = torch.empty(len(layout), dtype=torch.long)
    visual = torch.nonzero(layout.visual).flatten()
    text = torch.nonzero(layout.text).flatten()
    rank[text] = len(visual) + torch.arange(len(text))
    if features is not None:
        unit = F.normalize(features[visual.to(features.device)].float(), dim=-1)
        rank[visual] = farthest_first(unit, layout.image[visual])
        return rank
    due = torch.empty(len(visual), dtype=torch.float64)
    owner = layout.image[visual]
    for image, grid in enumerate(layout.grids):
        mine = torch.nonzero(owner == image).flatten()
        if len(mine) != grid.tokens:
            cells = layout.places[1:, visual].t().double()
            rank[visual] = farthest_first(cells, owner)
            return rank
        turn = torch.arange(grid.tokens, dtype=torch.float64)
        due[mine[_grid_order(grid)]] = (turn + 0.5) / grid.tokens
    rank[visual[torch.sort(due, stable=True).indices]] = torch.arange(len(visual))
    return rank
