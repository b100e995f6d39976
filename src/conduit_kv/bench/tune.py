"""The cheapest plan that keeps what is wanted of the full cache's accuracy, and how sure that is.

Successive halving: all candidates answer a few items, the better half of them twice as many, and so
on. What is left is then held to **fresh** items, dearest first, and the cheapest one before the
first failure is taken. In that order, fixed before the fresh items are seen, each test may err with
the whole 5 %, and the choice among many plans does not weaken the statement.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any

from conduit_kv.bench.record import OnChange, write_json
from conduit_kv.bench.run import Bench, Crew, Settings
from conduit_kv.errors import InputError
from conduit_kv.plan import Plan

if TYPE_CHECKING:
    from conduit_kv.engine.vlm import VLM

__all__ = ["CANDIDATES", "Goal", "Standing", "Tuned", "kept_share", "share_bound", "tune"]

CANDIDATES = (
    "tgv-kv:{}(of=visual)",
    "tgv-kv:{}(of=visual, cover=0.5)",
    "snapkv:{}(of=visual)",
    "prefixkv:{}(of=visual)",
    "uniform:{}(of=visual)",
    "text-random:{}(of=visual)",
)
BUDGETS = ("0.75", "0.5", "0.35", "0.25", "0.15", "0.1", "0.05")
_FINALISTS = 6
_HARDLY = 0.1
"""A plan that is less likely to keep the target is not asked further, if others are likelier."""


@dataclass(frozen=True)
class Goal:
    """What a plan must do.

    Parameters
    ----------
    target : float
        Share of the full cache's accuracy that is to be kept, in (0, 1].
    max_bytes : float or None
        Most bytes of K and V held, mean over items.
    confidence : float
        Of the statement, in (0.5, 1).
    """

    target: float = 0.98
    max_bytes: float | None = None
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise InputError(f"target {self.target:g} is not a share in (0, 1]: write 0.98")
        if not 0.5 < self.confidence < 1:
            raise InputError(f"confidence {self.confidence:g} is not in (0.5, 1): write 0.95")
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise InputError(f"max-bytes {self.max_bytes:g} holds nothing")


@dataclass(frozen=True)
class Standing:
    """How a plan does on some items.

    Attributes
    ----------
    plan : str
    n : int
    accuracy, full : float
        Of the plan and of the full cache on the same items.
    share : float
        The one of the other.
    at_least : float
        What it is with the goal's confidence.
    chance : float
        How likely it keeps the target, judged by these items.
    kv_bytes, full_bytes : float
    """

    plan: str
    n: int
    accuracy: float
    full: float
    share: float
    at_least: float
    chance: float
    kv_bytes: float
    full_bytes: float


@dataclass(frozen=True)
class Tuned:
    """What came out.

    Attributes
    ----------
    goal : Goal
    model : str
    tasks : tuple of str
    plan : str or None
        The cheapest plan shown to reach the goal; None if there is none.
    standings : tuple of Standing
        The finalists on fresh items, dearest first.
    rounds : tuple of (int, int)
        Plans and items per task of each round.
    """

    goal: Goal
    model: str
    tasks: tuple[str, ...]
    plan: str | None
    standings: tuple[Standing, ...]
    rounds: tuple[tuple[int, int], ...]

    @property
    def chosen(self) -> Standing | None:
        return next((each for each in self.standings if each.plan == self.plan), None)

    def statement(self) -> str:
        """What may be said, and how sure it is."""
        sure = f"{100 * self.goal.confidence:g} %"
        found = self.chosen
        if found is None:
            limit = ""
            if self.goal.max_bytes is not None:
                limit = f" and holds at most {self.goal.max_bytes / 1e6:.3g} MB"
            best = max(self.standings, key=lambda each: each.at_least, default=None)
            nearest = (
                f"; nearest is {best.plan}, which keeps {100 * best.share:.1f} %, with {sure} "
                f"confidence at least {100 * best.at_least:.1f} %"
                if best
                else ""
            )
            return (
                f"no plan is shown to keep {100 * self.goal.target:g} % of the full accuracy{limit}"
                f"{nearest}; more items may show it"
            )
        return (
            f"{found.plan} keeps {100 * found.share:.1f} % of the full cache's accuracy "
            f"({found.accuracy:.3f} of {found.full:.3f}) with "
            f"{100 * found.kv_bytes / found.full_bytes:.0f} % of its bytes; with {sure} confidence "
            f"at least {100 * found.at_least:.1f} %, on {found.n} items that the search did not see"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "statement": self.statement()}


def tune(
    vlm: VLM,
    tasks: Sequence[str],
    plans: Sequence[Plan],
    goal: Goal,
    *,
    first: int = 8,
    most: int = 200,
    seed: int = 0,
    file: Path | None = None,
    on_change: OnChange = "stop",
    crew_of: Callable[[Settings], Crew | None] = lambda _: None,
    progress: Callable[[str, int], None] = lambda *_: None,
) -> Tuned:
    """Search, then confirm.

    Parameters
    ----------
    vlm : VLM
    tasks : sequence of str
        Their items weigh the same.
    plans : sequence of Plan
        Candidates.
    goal : Goal
    first, most : int
        Items per task of the first round, and of the confirmation.
    seed : int
        Of the items of the search; the confirmation's is the next one.
    file : Path, optional
        Where results are kept, to be gone on with; beside it those of the confirmation.
    crew_of : callable
        Gives who asks the items of a run; see :meth:`Bench.run`.
    progress : callable
        Called with what is done and the number of plans, before each round.

    Raises
    ------
    InputError
        If there is nothing to choose from, or the full cache is never right.
    """
    alive = [plan for plan in dict.fromkeys(plans) if not plan.is_identity]
    if not alive:
        raise InputError("name plans that do something: full is what they are compared with")
    if not 1 <= first <= most:
        raise InputError(f"first is {first} and most {most}: take 1 <= first <= most")
    with tempfile.TemporaryDirectory() as scratch:
        file = file or Path(scratch) / "tune.json"

        def ask(some: Sequence[Plan], n: int, which: int, path: Path) -> list[Standing]:
            settings = Settings(tuple(tasks), tuple(some), n, which, timed=0)
            bench = Bench(vlm, settings, path, on_change)
            bench.run(crew=crew_of(settings))
            return [_standing(bench, plan, goal) for plan in some]

        rounds = []
        n = first
        while True:
            progress(f"{n} items per task", len(alive))
            rounds.append((len(alive), n))
            alive = _better_half(alive, ask(alive, n, seed, file), goal)
            on_change = "keep" if on_change == "restart" else on_change
            if n >= most or len(alive) <= _FINALISTS:
                break
            n = min(2 * n, most)
        progress(f"confirming on {most} fresh items per task", len(alive))
        fresh = ask(alive, most, seed + 1, file.with_suffix(".confirm.json"))
    order = {str(plan): number for number, plan in enumerate(alive)}
    fresh = sorted(fresh, key=lambda each: (-each.kv_bytes, order[each.plan]))
    chosen = None
    for standing in fresh:
        if goal.max_bytes is not None and standing.kv_bytes > goal.max_bytes:
            continue
        if standing.at_least < goal.target:
            break
        chosen = standing.plan
    tuned = Tuned(goal, vlm.name, tuple(tasks), chosen, tuple(fresh), tuple(rounds))
    return tuned


def save(tuned: Tuned, file: Path) -> None:
    """Write what came out as JSON."""
    write_json(file, tuned.to_dict())


def _standing(bench: Bench, plan: Plan, goal: Goal) -> Standing:
    mine, full = bench.answers(plan), bench.answers(Plan())
    ours, theirs = [score for _, score in mine], [score for _, score in full]
    if not any(theirs):
        raise InputError(
            f"the full cache answers none of {len(theirs)} items right: there is no accuracy to "
            "keep; take another task or more items"
        )
    mean, deviation = _margin(ours, theirs, goal.target)
    return Standing(
        plan=str(plan),
        n=len(ours),
        accuracy=fmean(ours),
        full=fmean(theirs),
        share=kept_share(ours, theirs),
        at_least=share_bound(ours, theirs, goal.confidence),
        chance=NormalDist().cdf(mean / deviation),
        kv_bytes=fmean(outcome.kv_bytes for outcome, _ in mine),
        full_bytes=fmean(outcome.full_bytes for outcome, _ in mine),
    )


def kept_share(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Accuracy of one, as a share of the other's."""
    return sum(ours) / sum(theirs)


def _margin(ours: Sequence[float], theirs: Sequence[float], share: float) -> tuple[float, float]:
    """Mean of ``ours - share * theirs`` and its standard error, one lost item added.

    Losses are rare and one-sided, so that the plain error is too small: items that all agree would
    look like certainty. With one lost item more a bound at 95 % errs in at most about 6 % of cases
    (simulated for accuracies of 0.8 to 1 and 60 to 300 items; half an item each way errs in 12 %).
    """
    differences = [a - share * b for a, b in zip(ours, theirs, strict=True)] + [-1.0]
    count = len(differences)
    mean = sum(differences) / count
    spread = sum(d * d for d in differences) / count - mean**2
    return mean, math.sqrt(spread / count)


def share_bound(ours: Sequence[float], theirs: Sequence[float], confidence: float) -> float:
    """The share of accuracy that is kept at least, with this confidence (one-sided).

    Fieller's: the largest share at which the margin above it is still shown to be positive.
    """
    z = NormalDist().inv_cdf(confidence)

    def shown(share: float) -> bool:
        mean, error = _margin(ours, theirs, share)
        return mean >= z * error

    low, high = 0.0, 2.0
    if not shown(low):
        return 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if shown(middle) else (low, middle)
    return low


def _better_half(plans: Sequence[Plan], standings: Sequence[Standing], goal: Goal) -> list[Plan]:
    """Half of them (or the finalists): one half by what they promise, the other by how safe.

    What a plan promises is how likely it keeps the target, times what it saves. The safe ones are
    what the search falls back on. A plan that is beaten by a likelier one that costs no more goes;
    so does one that hardly can keep the target.
    """
    fitting = [
        (plan, each)
        for plan, each in zip(plans, standings, strict=True)
        if goal.max_bytes is None or each.kv_bytes <= goal.max_bytes
    ]
    if not fitting:
        least = min(each.kv_bytes for each in standings)
        raise InputError(
            f"no candidate holds at most {goal.max_bytes or 0:.0f} bytes; the smallest holds "
            f"{least:.0f}: name smaller budgets"
        )
    likely = [pair for pair in fitting if pair[1].chance >= _HARDLY] or fitting
    best = [
        (plan, each)
        for plan, each in likely
        if not any(o.kv_bytes <= each.kv_bytes and o.chance > each.chance for _, o in likely)
    ]
    keep = max(_FINALISTS, len(plans) // 2)
    promise = sorted(best, key=lambda p: -p[1].chance * (1 - p[1].kv_bytes / p[1].full_bytes))
    safe = sorted(best, key=lambda p: (-p[1].chance, -p[1].kv_bytes))
    chosen: dict[Plan, None] = {}
    for pair in (pair for pairs in zip(promise, safe, strict=True) for pair in pairs):
        if len(chosen) < keep:
            chosen[pair[0]] = None
    return list(chosen)
