"""Ranking rules, each with the layers and the shape of its published schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from conduit_kv.methods.evict.parts import uniform_noise
from conduit_kv.methods.evict.uniform import thinned
from conduit_kv.methods.flow import best
from conduit_kv.methods.schedule import Shape, equal, halving, powers
from conduit_kv.view import StepView


@dataclass(frozen=True)
class Rule:
    """How visual tokens are ranked, and when and how many stay.

    Attributes
    ----------
    by : {"attention", "chance", "grid"}
        The newest token's attention, a draw per token and stage, or an even stride over each
        image's grid.
    deleting, routing : sequence of float
        Where stages begin, as a share of the depth, when the others are deleted or wait.
    first : int or None
        Layer of the first stage, at any depth.
    delete_shape, route_shape : Shape
    """

    by: Literal["attention", "chance", "grid"]
    deleting: Sequence[float]
    routing: Sequence[float]
    first: int | None
    delete_shape: Shape
    route_shape: Shape

    def layers(self, n_layers: int, waits: bool) -> tuple[int, ...]:
        """First layer of each stage: at least 1, each once."""
        places = [
            _rounded(share * n_layers) for share in (self.routing if waits else self.deleting)
        ]
        if self.first is not None:
            places = [self.first, *(place for place in places[1:] if place > self.first)]
        return tuple(sorted({min(max(place, 1), n_layers - 1) for place in places}))

    def shape(self, waits: bool) -> Shape:
        """Shares of the stages, up to their scale."""
        return self.route_shape if waits else self.delete_shape

    def best(self, view: StepView, count: int, seed: int) -> Tensor:
        """Places of the ``count`` best visual tokens of a view, ascending."""
        if self.by == "attention":
            return best(view.newest_attention, view, count)
        if self.by == "chance":
            return best(uniform_noise(seed, view.layer, view.index), view, count)
        visual = torch.nonzero(view.layout.visual).flatten()
        kept = torch.cat(thinned(view.layout, visual, count))
        if view.layout.visual[-1] and visual[-1] not in kept:
            kept[-1] = visual[-1]
        return torch.sort(kept).values


def _rounded(value: float) -> int:
    return int(value + 0.5)


_QUARTERS = (1 / 16, 1 / 4, 1 / 2, 3 / 4)
_LATE = (1 / 2, 5 / 8, 3 / 4, 7 / 8)

_PDROP = (_QUARTERS, _QUARTERS, None, powers, halving)

RULES = {
    "fastv": Rule("attention", (0.0,), _QUARTERS, 2, equal, equal),
    "pdrop": Rule("attention", *_PDROP),
    "nuwa": Rule("attention", (1 / 2,), _LATE, None, equal, equal),
    "random": Rule("chance", *_PDROP),
    "uniform": Rule("grid", *_PDROP),
}
