"""PyramidDrop: fewer visual tokens the deeper the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from conduit_kv.methods.base import register
from conduit_kv.methods.route.base import RULES, RouteMethod
from conduit_kv.methods.route.rules import Rule


@register
@dataclass(frozen=True)
class PDrop(RouteMethod):
    """Stages with shares l, l^2, l^3, l^4 of the visual tokens, the best by the newest token's
    attention; the others are deleted. See :class:`RouteMethod` for the score.

    The stages begin at L/16, L/4, L/2 and 3L/4, as in the schedules of Reroute's comparison. The
    original of 32 layers has ``pdrop(layers=[8,16,24], shares=[0.5,0.25,0.125])``.
    """

    name: ClassVar[str] = "pdrop"
    paper: ClassVar[str] = "https://arxiv.org/abs/2410.17247"

    @property
    def rule(self) -> Rule:
        return RULES["pdrop"]
