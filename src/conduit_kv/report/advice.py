"""Which plan to take for which usage, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conduit_kv.bench.run import with_random
from conduit_kv.errors import PlanError
from conduit_kv.plan import Plan
from conduit_kv.report.results import Results, Row, full_accuracy, is_control, is_full

__all__ = ["MARGINS", "USAGES", "Advice", "Entry", "Usage", "advise", "pooled"]

MARGINS = (0.02, 0.05, 0.10)
"""Losses of accuracy that a reader may be ready to accept."""
_SAME_COST = 1.03
_Z = 1.959963984540054


@dataclass(frozen=True)
class Usage:
    """A way of using a model, and the tasks that stand for it.

    Attributes
    ----------
    name, title : str
    what : str
        Who does this, and what their answers rest on.
    fits : callable
        Whether a row measures it.
    cost : str
        The row's field that is to be small.
    """

    name: str
    title: str
    what: str
    fits: Callable[[Row], bool]
    cost: str = "kv_bytes"


def _images(row: Row) -> int:
    return int(row.get("n_images") or 1)


def _recurs(row: Row) -> bool:
    return str(row["task"]).startswith("reuse")


USAGES = (
    Usage(
        "one-shot",
        "One question, a short answer",
        "One image, one question. A short answer is decided while the prompt is read; the late "
        "tasks let it rest on what was kept, which is the harder test.",
        lambda row: row["protocol"] in ("short", "late") and _images(row) == 1 and not _recurs(row),
    ),
    Usage(
        "long-answer",
        "A long answer",
        "Captions, transcripts, lists: most tokens are written after eviction, and each of them "
        "reads the cache.",
        lambda row: row["protocol"] == "list" and not _recurs(row),
    ),
    Usage(
        "conversation",
        "A conversation about one image",
        "What the second question needs must have survived the first one.",
        lambda row: row["protocol"] == "follow-up" and _images(row) == 1 and not _recurs(row),
    ),
    Usage(
        "many-images",
        "Many images in one prompt",
        "Several images compete for what is kept; the question is about one of them.",
        lambda row: _images(row) > 1 and not _recurs(row),
    ),
    Usage(
        "recurring-images",
        "The same images again and again",
        "Images that were read before come back in other prompts; what is saved is the time to the "
        "first token.",
        _recurs,
        "first_token_s",
    ),
)


@dataclass(frozen=True)
class Entry:
    """One plan over the tasks of a usage, each task with the same weight.

    Attributes
    ----------
    plan : str
    tasks : tuple of str
    n : int
        Items of all tasks together.
    accuracy, full : float
        Means of the plan and of the full cache on the same items.
    low, high : float
        95 % interval of the difference to the full cache.
    share : float
        Bytes of K and V held, of those of the full cache.
    kv_bytes, full_bytes : float
    agreement : float or None
        Share of answers equal to those of the full cache.
    first_token_s, per_token_s : float or None
    chance, wrong_image : float or None
        Accuracy of the random control under the same budget, and of the plan with wrong images.
    """

    plan: str
    tasks: tuple[str, ...]
    n: int
    accuracy: float
    full: float
    low: float
    high: float
    share: float
    kv_bytes: float
    full_bytes: float
    agreement: float | None
    first_token_s: float | None
    per_token_s: float | None
    chance: float | None = None
    wrong_image: float | None = None

    @property
    def difference(self) -> float:
        return self.accuracy - self.full

    @property
    def is_control(self) -> bool:
        return is_control(self.plan)

    def within(self, margin: float) -> bool:
        """Whether the loss is shown to be at most ``margin``."""
        return self.low >= -margin


@dataclass(frozen=True)
class Advice:
    """What to take for a usage on a model.

    Attributes
    ----------
    usage : Usage
    model : str
    margin : float
        Loss of accuracy that may be.
    entries : tuple of Entry
        All plans that were measured on all of its tasks, cheapest first.
    full : Entry or None
        The full cache.
    """

    usage: Usage
    model: str
    margin: float
    entries: tuple[Entry, ...]
    full: Entry | None

    def pick(self, margin: float | None = None) -> Entry | None:
        """The cheapest plan whose loss is shown to be at most ``margin``."""
        margin = self.margin if margin is None else margin
        good = [entry for entry in self.entries if entry.within(margin)]
        if not good:
            return None
        # Bytes under one budget differ by roundings: of plans that cost the same the best is taken.
        most = _SAME_COST * _cost(good[0], self.usage)
        alike = [entry for entry in good if _cost(entry, self.usage) <= most]
        return max(alike, key=lambda entry: entry.accuracy)

    @property
    def closest(self) -> Entry | None:
        """Where no plan is shown to be good enough: the one with the least loss."""
        return max(self.entries, key=lambda e: (e.low, e.difference, -e.kv_bytes), default=None)


def advise(results: Results, model: str, margin: float = 0.05) -> list[Advice]:
    """What to take for each usage that was measured.

    A plan is good enough if the lower end of the 95 % interval of its paired difference to the full
    cache, mean over the usage's tasks, is not below ``-margin``. Of those the cheapest is taken.
    """
    plain = results.of(model)
    wrong = {(row["task"], row["plan"]): row for row in results.of(model, "wrong-image")}
    found = []
    for usage in USAGES:
        rows = [row for row in plain if usage.fits(row)]
        tasks = tuple(dict.fromkeys(row["task"] for row in rows))
        by_plan: dict[str, dict[str, Row]] = {}
        for row in rows:
            by_plan.setdefault(row["plan"], {})[row["task"]] = row
        complete = {p: [r[t] for t in tasks] for p, r in by_plan.items() if len(r) == len(tasks)}
        entries = []
        full = None
        for plan, mine in complete.items():
            chance = complete.get(_chance_of(plan) or "")
            shown = [wrong[task, plan] for task in tasks if (task, plan) in wrong]
            entry = _entry(plan, tasks, mine, chance, shown)
            if is_full(plan):
                full = full or entry
            else:
                entries.append(entry)
        if entries:
            order = sorted(entries, key=lambda entry: (_cost(entry, usage), -entry.accuracy))
            found.append(Advice(usage, model, margin, tuple(order), full))
    return found


def _entry(
    plan: str,
    tasks: tuple[str, ...],
    rows: Sequence[Row],
    chance: Sequence[Row] | None,
    wrong: Sequence[Row],
) -> Entry:
    mean, low, high = pooled(rows)
    full_bytes = statistics.fmean(row.get("full_bytes") or row["kv_bytes"] for row in rows)
    kv_bytes = statistics.fmean(row["kv_bytes"] for row in rows)
    full = statistics.fmean(full_accuracy(row) for row in rows)
    return Entry(
        plan=plan,
        tasks=tasks,
        n=sum(row["n"] for row in rows),
        accuracy=full + mean,
        full=full,
        low=low,
        high=high,
        share=kv_bytes / full_bytes if full_bytes else 1.0,
        kv_bytes=kv_bytes,
        full_bytes=full_bytes,
        agreement=_mean(rows, "agreement"),
        first_token_s=_mean(rows, "first_token_s"),
        per_token_s=_mean(rows, "per_token_s"),
        chance=_mean(chance, "accuracy") if chance else None,
        wrong_image=_mean(wrong, "accuracy") if len(wrong) == len(rows) else None,
    )


def pooled(rows: Sequence[Row]) -> tuple[float, float, float]:
    """Mean difference to the full cache over tasks, and its 95 % interval.

    n pairs that all agree have no spread, and do not show that there is none: as Agresti and Min
    do, half a pair that differs is added each way to every task. The tasks' items are independent,
    so that their squared errors add up.

    Returns
    -------
    float, float, float
        Mean as observed, and the interval, which lies a little nearer to 0 than the mean.
    """
    centres, errors = [], []
    for row in rows:
        difference, n = row["vs_full"], row["n"]
        mean = difference["mean"]
        deviation = (difference["high"] - difference["low"]) / (2 * _Z)
        squares = n * (n * deviation**2 + mean**2) + 1
        centre = n * mean / (n + 2)
        centres.append(centre)
        errors.append(max(0.0, squares / (n + 2) - centre**2) / (n + 2))
    half = _Z * math.sqrt(sum(errors)) / len(rows)
    centre = statistics.fmean(centres)
    observed = statistics.fmean(row["vs_full"]["mean"] for row in rows)
    return observed, max(-1.0, centre - half), min(1.0, centre + half)


def _mean(rows: Sequence[Row], field: str) -> float | None:
    values = [row.get(field) for row in rows]
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(rows) and known else None


def _cost(entry: Entry, usage: Usage) -> float:
    value = getattr(entry, usage.cost)
    return math.inf if value is None else float(value)


def _chance_of(plan: str) -> str | None:
    """The plan that chooses by chance under the same budget."""
    try:
        _, *control = with_random([Plan.parse(plan)])
    except PlanError:
        return None
    return str(control[0]) if control else None
