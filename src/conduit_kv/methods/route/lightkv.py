"""LightKV: merge neighbouring visual tokens between layers, weighted by what the text looks at."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from conduit_kv.errors import PlanError
from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.base import register
from conduit_kv.methods.flow import Chosen, Flops, FlowMethod
from conduit_kv.methods.schedule import Schedule, check_layers
from conduit_kv.ranks import highest
from conduit_kv.view import LayerView, StepView

_FEWEST = 8
"""An image of fewer tokens than this times the number of windows is left alone."""
_FLOATS = 1 << 24


@register
@dataclass(frozen=True)
class LightKv(FlowMethod):
    r"""Before some layers, within windows of each image's grid, pairs of tokens become one.

    A window's tokens, in order, are split into A (even) and B (odd). Each of A finds the most
    similar of B (cosine of hidden states), and the ``floor(rho n)`` most similar pairs of a window
    of ``n`` merge:

    .. math:: x_b \leftarrow \frac{\xi_b x_b + \sum_a \xi_a x_a}{\xi_b + \sum_a \xi_a}, \quad
       \xi_i = \sum_h \sum_{j \in text} P_{h,i,j}

    P is softmax of ``q_i k_j / sqrt(d)`` in the layer that has just run, without the causal mask,
    over the queries ``i`` of all tokens, as the public code has it; ``weights="key-softmax"`` takes
    it over the keys. Text is all that is no image, also what comes later. Everything else is
    untouched, K/V included: later layers have fewer tokens.

    ``lightkv:0.55`` chooses the layers for a mean of 55 % of the visual tokens over all layers, as
    near to the published proportions (12, 18, 24 of 32) as the depth allows; stages are whole
    layers, so that the mean is met to a fraction of a layer. Where images are too small to merge as
    much, what can be merged is, and the report says so.

    Parameters
    ----------
    layers : tuple of int or None
        In place of a budget: how many layers have run before each stage.
    rho : float
        Share of a window's tokens that merge, at most 0.5; 0 does nothing.
    windows : tuple of int
        Windows per side of an image, stage by stage. Rows and columns that do not divide go to the
        first windows.
    positions : {"auto", "renumber", "keep"}
        ``renumber``: tokens take positions without gaps from the stage on, as published. ``keep``:
        a merged token keeps its own (B's). ``auto``: keep for M-RoPE, renumber else.
    weights : {"query-softmax", "key-softmax"}
    """

    name: ClassVar[str] = "lightkv"
    stage: ClassVar[str] = "route"
    paper: ClassVar[str] = "https://arxiv.org/abs/2605.00789"
    in_decode: ClassVar[str] = "decoded tokens run all layers, on what each layer holds"
    listens_to: ClassVar[Literal["newest", "all"]] = "all"
    instead_of_budget: ClassVar[tuple[str, ...]] = ("layers",)

    layers: tuple[int, ...] | None = None
    rho: float = 0.5
    windows: tuple[int, ...] = (4, 2, 1)
    positions: Literal["auto", "renumber", "keep"] = "auto"
    weights: Literal["query-softmax", "key-softmax"] = "query-softmax"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None and not self.budget.is_everything:
            raise PlanError(f"{self.name}: a budget and layers both say how much: take one")
        if not 0 <= self.rho <= 0.5:
            raise PlanError(f"{self.name}: rho={self.rho:g} is not in [0, 0.5]")
        if not self.windows or any(windows < 1 for windows in self.windows):
            raise PlanError(f"{self.name}: windows={list(self.windows)}: at least 1 per side")
        if self.layers is not None and len(self.layers) != len(self.windows):
            raise PlanError(f"{self.name}: give as many windows as layers")

    @property
    def is_identity(self) -> bool:
        return self.rho == 0 or (self.layers is None and self.budget.is_everything)

    def check(self, n_layers: int) -> None:
        if self.layers is not None:
            check_layers(self.name, self.layers, n_layers)
            if self.layers[0] < 1:
                raise PlanError(f"{self.name}: a layer must have run before tokens merge")
        elif not self.is_identity and n_layers <= len(self.windows):
            raise PlanError(
                f"{self.name}: {len(self.windows)} stages need more than {n_layers} layers: give "
                "fewer windows, such as windows=[1]"
            )

    def contiguous(self, axes: int) -> bool:
        if self.positions == "auto":
            return axes == 1
        if self.positions == "renumber" and axes > 1:
            raise PlanError(
                f"{self.name}: positions=renumber has no meaning for positions of {axes} axes "
                "(M-RoPE): take keep"
            )
        return self.positions == "renumber"

    def schedule(self, n_layers: int, layout: Layout, flops: Flops) -> Schedule | None:
        visual = int(layout.visual.sum())
        if not visual or self.is_identity:
            return None
        counts, left, small = [], layout, list[int]()
        for per_side in self.windows:
            left = left.select(self._survivors(left, per_side, small))
            counts.append(int(left.visual.sum()))
        if self.layers is not None:
            return Schedule(self.layers, tuple(counts), n_layers, visual)
        average = self.mean_active(visual)
        if average >= visual:
            return None
        layers = _stages(n_layers, (visual, *counts), average)
        found = Schedule(layers, tuple(counts), n_layers, visual)
        if abs(found.average - average) * n_layers > visual / 2 and not small:
            least = Schedule(tuple(range(1, 1 + len(counts))), tuple(counts), n_layers, visual)
            raise PlanError(
                f"{self.name}: {average:.1f} of {visual} visual tokens, mean over {n_layers} "
                f"layers, cannot be met by merging {self.rho:g} of each window. The smallest is "
                f"{least.average:.1f} tokens ({least.average / visual:.3f}); more windows make it "
                "smaller"
            )
        return found

    def _survivors(self, layout: Layout, per_side: int, small: list[int]) -> Tensor:
        """Tokens left after a stage, which of a pair being unknown: as many as there will be."""
        keep = torch.ones(len(layout), dtype=torch.bool)
        for window in _windows(layout, per_side, small):
            keep[window[::2][: int(self.rho * len(window))]] = False
        return torch.nonzero(keep).flatten()

    def choose(self, view: StepView, count: int) -> Chosen:
        stage = view.stage
        visual = torch.nonzero(view.layout.visual).flatten()
        hidden = view.hidden.float()
        weight = self._weights(view).to(hidden.device)
        sums, totals = weight[:, None] * hidden, weight.clone()
        keep = torch.ones(len(view.index), dtype=torch.bool)
        small: list[int] = []
        for window in _windows(view.layout, self.windows[stage], small):
            gone, into = pairs(hidden[window.to(hidden.device)], int(self.rho * len(window)))
            gone, into = window[gone].to(hidden.device), window[into].to(hidden.device)
            sums.index_add_(0, into, sums[gone])
            totals.index_add_(0, into, weight[gone])
            keep[gone.cpu()] = False
        note = ""
        if small:
            note = (
                f"{self.name}: images of {', '.join(map(str, sorted(set(small))))} tokens are too "
                f"small for {self.windows[stage]} x {self.windows[stage]} windows and were left "
                "alone there"
            )
        active = visual[keep[visual]]
        at = active.to(hidden.device)
        # What nothing merges into is left to the bit.
        same = (totals == weight)[at, None]
        merged = torch.where(same, hidden[at], sums[at] / totals[at, None])
        return Chosen(active, merged, note=note)

    def _weights(self, view: StepView) -> Tensor:
        """``[R]`` fp32: what the text looks at."""
        total = torch.zeros(len(view.index))
        for part in view.attention:
            total += text_weights(part, view.layout.text, self.weights).cpu()
        return total.clamp(min=1e-12)

    def listens_before(self, layer: int, schedule: Schedule) -> bool:
        return layer in schedule.layers


def text_weights(view: LayerView, text: Tensor, softmax: str) -> Tensor:
    """``[R]`` fp32: attention without a mask that the step's tokens pay to the text among them.

    Parameters
    ----------
    view : LayerView
        With queries of all of the step's ``R`` tokens.
    text : Tensor
        ``[R]`` bool.
    softmax : {"query-softmax", "key-softmax"}
        Over the queries, or over the keys of the step.
    """
    rows = len(text)
    keys = view.keys[:, -rows:].float()
    where = text.to(keys.device)
    group = view.heads // view.kv_heads
    total = keys.new_zeros(rows)
    for head in range(view.heads):
        query, key = view.step_queries[head].float(), keys[head // group]
        if softmax == "query-softmax":
            columns = key[where]
            for start in range(0, len(columns), max(1, _FLOATS // rows)):
                part = columns[start : start + max(1, _FLOATS // rows)]
                total += (query @ part.T * view.scaling).softmax(0).sum(1)
        else:
            for start in range(0, rows, max(1, _FLOATS // rows)):
                stop = start + max(1, _FLOATS // rows)
                weights = (query[start:stop] @ key.T * view.scaling).softmax(1)
                total[start:stop] += weights[:, where].sum(1)
    return total


def pairs(states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` most similar pairs of a window: which of A go, and into which of B.

    Parameters
    ----------
    states : Tensor
        ``[n, D]``; A are the even places, B the odd ones. Ties go to the lower index.
    """
    even, odd = torch.arange(0, len(states), 2), torch.arange(1, len(states), 2)
    if not count or not len(odd):
        return even[:0], odd[:0]
    unit = F.normalize(states, dim=-1)
    best, partner = (unit[0::2] @ unit[1::2].T).cpu().max(1)
    order = highest(best, count)
    return even[order], odd[partner[order]]


def _windows(layout: Layout, per_side: int, small: list[int]) -> Iterator[Tensor]:
    """Places of the visual tokens of each window of each image and frame, ascending."""
    for image, grid in enumerate(layout.grids):
        for frame in range(grid.frames):
            mine = torch.nonzero((layout.image == image) & (layout.frame == frame)).flatten()
            if not len(mine):
                continue
            if len(mine) < _FEWEST * per_side**2:
                small.append(len(mine))
                continue
            rows, columns = _extent(grid, frame)
            down = _window_of(layout.row[mine], rows, per_side)
            across = _window_of(layout.column[mine], columns, per_side)
            number = down * per_side + across
            for window in range(per_side**2):
                inside = mine[number == window]
                if len(inside):
                    yield inside


def _extent(grid: Grid, frame: int) -> tuple[int, int]:
    """Rows and columns of a frame."""
    views = [view for view in grid.views if view.frame == frame]
    if not views:
        return grid.rows, grid.columns
    return max(view.row + view.rows for view in views), max(view.columns for view in views)


def _window_of(place: Tensor, length: int, per_side: int) -> Tensor:
    """Which window each row (or column) lies in; a remainder goes to the first ones."""
    size, more = divmod(length, per_side)
    edges = torch.tensor([size + (window < more) for window in range(per_side)]).cumsum(0)
    return torch.searchsorted(edges, place, right=True)


@functools.lru_cache(maxsize=256)
def _stages(n_layers: int, counts: Sequence[int], average: float) -> tuple[int, ...]:
    """First layers of the stages whose mean is nearest, then nearest to even spacing from 2/4 on.

    Published: 12, 18, 24 of 32, that is 2, 3, 4 of a step.
    """
    stages = len(counts) - 1
    steps = range(2, stages + 2)
    best: tuple[float, float, tuple[int, ...]] = (math.inf, math.inf, ())
    for layers in itertools.combinations(range(1, n_layers), stages):
        edges = (0, *layers, n_layers)
        total = sum(c * (b - a) for c, a, b in zip(counts, edges, edges[1:], strict=False))
        off = abs(total - average * n_layers)
        # Within an eighth of a dense layer the mean is met; then the shape decides.
        off = max(0.0, off - counts[0] / 8)
        if off > best[0]:
            continue
        spaced = list(zip(layers, steps, strict=True))
        step = sum(layer / s for layer, s in spaced) / stages
        shape = sum((layer - s * step) ** 2 for layer, s in spaced)
        best = min(best, (off, shape, layers))
    return best[2]
