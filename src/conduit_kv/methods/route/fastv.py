"""FastV: after the first layers, most visual tokens are not needed any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from conduit_kv.methods.base import register
from conduit_kv.methods.route.base import RULES, RouteMethod
from conduit_kv.methods.route.rules import Rule


@register
@dataclass(frozen=True)
class FastV(RouteMethod):
    """One decision, before layer K = 2: the best by the newest token's attention stay, the others
    are deleted. See :class:`RouteMethod` for the score.

    The original scores with layer K - 1's own attention (``scores_from="previous"``); the default
    is Reroute's release, which computes layer K's attention from the states that enter it.
    Published settings are K = 2 or 3 (``layers=[3]``).
    """

    name: ClassVar[str] = "fastv"
    paper: ClassVar[str] = "https://arxiv.org/abs/2403.06764"

    @property
    def rule(self) -> Rule:
        return RULES["fastv"]
