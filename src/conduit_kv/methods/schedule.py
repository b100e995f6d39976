"""How many visual tokens run in which layers, and how a target is met in integer counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conduit_kv.errors import PlanError


@dataclass(frozen=True)
class Schedule:
    """Visual tokens active, stage by stage.

    Attributes
    ----------
    layers : tuple of int
        First layer of each stage; all tokens run in the layers before the first one.
    counts : tuple of int
        Visual tokens active in each stage.
    n_layers, visual : int
        Layers of the model, and visual tokens that there are.
    """

    layers: tuple[int, ...]
    counts: tuple[int, ...]
    n_layers: int
    visual: int

    @property
    def per_layer(self) -> list[int]:
        """Visual tokens active in each layer."""
        active = [self.visual] * self.layers[0]
        for count, length in zip(self.counts, _lengths(self.layers, self.n_layers), strict=True):
            active += [count] * length
        return active

    @property
    def average(self) -> float:
        """Visual tokens active, mean over all layers."""
        return sum(self.per_layer) / self.n_layers

    def formula(self) -> str:
        """How the average comes about, in figures."""
        parts = [(self.visual, self.layers[0])]
        parts += zip(self.counts, _lengths(self.layers, self.n_layers), strict=True)
        terms = " + ".join(f"{length} x {count}" for count, length in parts if length)
        return f"({terms}) / {self.n_layers} = {self.average:.1f} of {self.visual}"


Shape = Callable[[float, int], float]
"""Share active at a level, in stage 0, 1, ...: rises with the level, from 0 to 1."""


def equal(level: float, stage: int) -> float:
    """The same share in every stage."""
    return min(level, 1.0)


def powers(level: float, stage: int) -> float:
    """PyramidDrop: l, l^2, l^3, l^4."""
    return float(min(level, 1.0) ** (stage + 1))


def halving(level: float, stage: int) -> float:
    """Reroute at PyramidDrop's cost: 4 : 4 : 2 : 1, each at most 1."""
    return float(min(level * 0.5 ** max(stage - 1, 0), 1.0))


def solve(name: str, n_layers: int, visual: int, layers: Sequence[int], shape: Shape,
          average: float) -> Schedule:  # fmt: skip
    """The schedule of a shape whose mean over all layers is ``average`` visual tokens.

    Counts are whole, at least 1, and do not grow from a stage to the next of a falling shape. Their
    sum over the layers is within half of the longest stage of ``average * n_layers``.

    Raises
    ------
    PlanError
        If the layers before the first stage alone, and one token after, are more.
    """
    lengths = _lengths(layers, n_layers)
    total = average * n_layers
    least = visual * layers[0] + sum(lengths)
    if total < least - max(lengths) / 2:
        raise PlanError(
            f"{name}: {average:.1f} of {visual} visual tokens, mean over {n_layers} layers, cannot "
            f"be met: the first {layers[0]} layers run all of them. The smallest is "
            f"{least / n_layers:.1f} tokens ({least / n_layers / visual:.3f})"
        )

    def exact(level: float) -> list[float]:
        return [max(1.0, visual * shape(level, stage)) for stage in range(len(layers))]

    def filled(level: float) -> float:
        counts = exact(level)
        return visual * layers[0] + sum(c * n for c, n in zip(counts, lengths, strict=True))

    low, high = 0.0, 1.0
    while filled(high) < min(total, visual * n_layers) and high < 2.0 ** len(layers):
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if filled(middle) < total else (low, middle)
    counts = [min(int(count + 1e-9), visual) for count in exact(high)]
    missing = total - visual * layers[0] - sum(c * n for c, n in zip(counts, lengths, strict=True))
    for stage, length in enumerate(lengths):  # from the first, so that counts still fall
        if missing > max(lengths) / 2 and counts[stage] < visual:
            counts[stage] += 1
            missing -= length
    return Schedule(tuple(layers), tuple(counts), n_layers, visual)


def solve_cost(name: str, n_layers: int, visual: int, layers: Sequence[int], shape: Shape,
               flops: Callable[[Sequence[int]], float], share: float) -> Schedule:  # fmt: skip
    """The largest schedule of a shape whose prefill takes at most ``share`` of the full FLOPs.

    Raises
    ------
    PlanError
        If even one token per stage takes more.
    """
    lengths = _lengths(layers, n_layers)
    allowed = share * flops([visual] * n_layers)
    low, high = (visual * layers[0] + sum(lengths)) / n_layers, float(visual)
    smallest = solve(name, n_layers, visual, layers, shape, low)
    if flops(smallest.per_layer) > allowed:
        least = share * flops(smallest.per_layer) / allowed
        raise PlanError(
            f"{name}: flops={share:g} cannot be met: text, the first {layers[0]} layers and one "
            f"token after take {least:.3f} of the full prefill's FLOPs"
        )
    found = smallest
    for _ in range(60):
        middle = (low + high) / 2
        tried = solve(name, n_layers, visual, layers, shape, middle)
        if flops(tried.per_layer) <= allowed:
            low, found = middle, tried
        else:
            high = middle
    return found


def check_layers(name: str, layers: Sequence[int], n_layers: int) -> None:
    """Raise PlanError unless the stages begin at ascending layers of the model."""
    rising = all(a < b for a, b in itertools.pairwise(layers))
    if not layers or not rising or layers[0] < 0 or layers[-1] >= n_layers:
        raise PlanError(
            f"{name}: layers={list(layers)} are not ascending layers of a model of {n_layers} "
            f"(0 to {n_layers - 1})"
        )


def _lengths(layers: Sequence[int], n_layers: int) -> list[int]:
    return [b - a for a, b in itertools.pairwise([*layers, n_layers])]
