"""The route stage: rank the visual tokens before some layers, and let the best run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from conduit_kv.errors import PlanError
from conduit_kv.layout import Layout
from conduit_kv.methods.flow import Chosen, Flops, FlowMethod
from conduit_kv.methods.route.rules import RULES, Rule
from conduit_kv.methods.schedule import Schedule, check_layers, solve, solve_cost
from conduit_kv.view import StepView

RuleName = Literal["fastv", "pdrop", "nuwa", "random", "uniform"]


@dataclass(frozen=True)
class RouteMethod(FlowMethod):
    r"""Base of the methods that rank: before a stage the best ``n`` visual tokens stay active.

    .. math:: s_i = \frac{1}{H} \sum_h A_{h, last, i}

    with the attention of the newest token in the stage's first layer, computed from the states
    that enter it, over everything that the token could see. The cache of a layer holds exactly the
    tokens that were active in it.

    A target (``budget`` or ``flops``) is met by scaling the schedule's shape, in whole tokens;
    ``shares`` gives the shares of the turn's visual tokens themselves, ``max(1, int(share * N))``
    tokens in a stage.

    Parameters
    ----------
    flops : float or None
        In place of a budget: share of the full prefill's FLOPs (attention and MLP of all layers).
    shares : tuple of float or None
        In place of a budget: share active in each stage.
    layers : tuple of int or None
        First layer of each stage; by default as the schedule has them at the model's depth.
    seed : int
        Of random ranks.
    avg_tokens : int or None
        Another name for a budget in tokens, in Python.
    """

    stage: ClassVar[str] = "route"
    in_decode: ClassVar[str] = "decoded tokens run all layers, on what each layer holds"
    instead_of_budget: ClassVar[tuple[str, ...]] = ("flops", "shares", "avg_tokens")

    flops: float | None = None
    shares: tuple[float, ...] | None = None
    layers: tuple[int, ...] | None = None
    scores_from: Literal["layer", "previous"] = "layer"
    seed: int = 0
    avg_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.avg_tokens is not None:
            object.__setattr__(self, "budget", int(self.avg_tokens))
            object.__setattr__(self, "avg_tokens", None)
        super().__post_init__()
        ways = [self.flops is not None, self.shares is not None, not self.budget.is_everything]
        if sum(ways) > 1:
            raise PlanError(f"{self.name}: a budget, flops and shares all say how much: take one")
        if self.flops is not None and not 0 < self.flops <= 1:
            raise PlanError(f"{self.name}: flops={self.flops:g} is not a share in (0, 1]")
        self._check_shares()
        if self.scores_from == "previous" and self.waits:
            raise PlanError(
                f"{self.name}: the layer before a stage knows nothing of tokens that waited in it: "
                "scores_from=previous needs delete"
            )

    def _check_shares(self) -> None:
        if self.shares is None:
            return
        if not self.shares or any(not 0 < share <= 1 for share in self.shares):
            raise PlanError(f"{self.name}: shares={list(self.shares)} are not all in (0, 1]")
        if self.layers is not None and len(self.layers) != len(self.shares):
            raise PlanError(f"{self.name}: give as many shares as layers")
        if not self.waits and sorted(self.shares, reverse=True) != list(self.shares):
            raise PlanError(f"{self.name}: what is deleted is gone, so that shares cannot grow")

    @property
    def is_identity(self) -> bool:
        if self.shares is not None:
            return all(share == 1.0 for share in self.shares)
        return self.flops == 1.0 if self.flops is not None else self.budget.is_everything

    @property
    def rule(self) -> Rule:
        """How tokens are ranked."""
        raise NotImplementedError

    @property
    def pace(self) -> Rule:
        """The rule whose layers and shape the schedule follows."""
        return self.rule

    def stages(self, n_layers: int) -> tuple[int, ...]:
        """First layer of each stage."""
        layers = self.layers
        if layers is None:
            if n_layers < 2:
                raise PlanError(f"{self.name}: a model of one layer has none to route after")
            layers = self.pace.layers(n_layers, self.waits)
            if self.shares is not None and len(self.shares) != len(layers):
                raise PlanError(
                    f"{self.name}: its stages begin at layers {list(layers)}: give {len(layers)} "
                    "shares, or layers=[...] besides"
                )
        check_layers(self.name, layers, n_layers)
        return layers

    def check(self, n_layers: int) -> None:
        if not self.is_identity:
            self.stages(n_layers)

    def schedule(self, n_layers: int, layout: Layout, flops: Flops) -> Schedule | None:
        visual = int(layout.visual.sum())
        layers = self.stages(n_layers)
        if not visual or self.is_identity:
            return None
        if self.shares is not None:
            counts = tuple(max(1, int(visual * share)) for share in self.shares)
            return Schedule(layers, counts, n_layers, visual)
        shape = self.pace.shape(self.waits)
        if self.flops is not None:
            return solve_cost(self.name, n_layers, visual, layers, shape, flops, self.flops)
        average = self.mean_active(visual)
        if average >= visual:
            return None
        return solve(self.name, n_layers, visual, layers, shape, average)

    def choose(self, view: StepView, count: int) -> Chosen:
        return Chosen(self.rule.best(view, count, self.seed))

    def listens_before(self, layer: int, schedule: Schedule) -> bool:
        return self.scores_from == "previous" and layer in schedule.layers


__all__ = ["RULES", "RouteMethod", "RuleName"]
