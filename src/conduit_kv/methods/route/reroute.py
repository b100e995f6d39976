"""Reroute: tokens that are not needed now wait, and may come back; and its opposite, delete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from conduit_kv.methods.base import register
from conduit_kv.methods.route.base import RULES, RouteMethod, RuleName
from conduit_kv.methods.route.rules import Rule


@dataclass(frozen=True)
class _Ranked(RouteMethod):
    rank: RuleName = "pdrop"
    schedule_of: Literal["rank", "fastv", "pdrop", "nuwa"] = "rank"

    @property
    def rule(self) -> Rule:
        return RULES[self.rank]

    @property
    def pace(self) -> Rule:
        return self.rule if self.schedule_of == "rank" else RULES[self.schedule_of]


@register
@dataclass(frozen=True)
class Reroute(_Ranked):
    """Recoverable routing: the visual tokens that a stage does not take wait unchanged on the
    residual stream, write no K/V in its layers, and are ranked again with all others before the
    next stage. See :class:`RouteMethod` for the score.

    At the same counts per stage K/V bytes and FLOPs are those of ``delete``, but for the ranking,
    which sees all tokens each time.

    Parameters
    ----------
    rank : {"pdrop", "fastv", "nuwa", "random", "uniform"}
        The rule, with its schedule. ``pdrop``: stages at L/16, L/4, L/2, 3L/4 with shares
        4 : 4 : 2 : 1. ``fastv``: from layer 2 and at the same later ones, equal shares. ``nuwa``:
        L/2, 5L/8, 3L/4, 7L/8, equal shares. ``random`` and ``uniform`` are controls.
    schedule_of : str
        Take layers and shape from another rule: a control at the same cost.
    """

    name: ClassVar[str] = "reroute"
    paper: ClassVar[str] = "https://arxiv.org/abs/2606.12412"

    @property
    def waits(self) -> bool:
        return True


@register
@dataclass(frozen=True)
class Delete(_Ranked):
    """Visual tokens that a stage does not take are gone: FastV, PyramidDrop and Nuwa's second stage
    as they were, and controls. See :class:`RouteMethod` for the score.

    Parameters
    ----------
    rank : {"pdrop", "fastv", "nuwa", "random", "uniform"}
        The rule, with its schedule. ``nuwa`` decides once, at L/2.
    schedule_of : str
        Take layers and shape from another rule: a control at the same cost.
    """

    name: ClassVar[str] = "delete"
    paper: ClassVar[str] = "https://arxiv.org/abs/2606.12412"
