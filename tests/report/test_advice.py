"""Which plan is recommended, and how sure one must be of it."""

import math

import numpy as np
import pytest

from conduit_kv.bench.stats import compare
from conduit_kv.report.advice import advise, pooled
from conduit_kv.report.results import load, series_of
from tests.report.conftest import Write, row


def one(write: Write, rows: list[dict], usage: str = "one-shot", margin: float = 0.05):  # type: ignore
    found = advise(load([write(rows)]), "toy", margin)
    return next(advice for advice in found if advice.usage.name == usage)


def test_cheapest_plan_within_the_margin(write: Write) -> None:
    rows = [
        row("board", "full", 0.9, 0.9),
        row("board", "tgv-kv:0.5", 0.90, 0.9),
        row("board", "tgv-kv:0.2", 0.89, 0.9),
        row("board", "tgv-kv:0.1", 0.80, 0.9),
    ]
    advice = one(write, rows)
    assert advice.pick().plan == "tgv-kv:0.2"
    assert advice.pick(0.005) is None
    assert advice.pick(0.15).plan == "tgv-kv:0.1"
    assert advice.full.accuracy == pytest.approx(0.9)
    assert advice.closest.plan == "tgv-kv:0.5"


def test_a_loss_that_may_be_there_is_not_accepted(write: Write) -> None:
    """With few items the interval, not the mean, decides."""
    wide = {"mean": 0.0, "low": -0.3, "high": 0.3, "verdict": "not separated"}
    rows = [row("board", "tgv-kv:0.2", 0.9, 0.9, n=6, vs_full=wide)]
    assert one(write, rows).pick() is None
    same = {"mean": 0.0, "low": 0.0, "high": 0.0, "verdict": "tie"}
    rows = [row("board", "tgv-kv:0.2", 0.9, 0.9, n=6, vs_full=same)]
    assert one(write, rows).pick() is None
    rows = [row("board", "tgv-kv:0.2", 0.9, 0.9, n=400, vs_full=same)]
    assert one(write, rows).pick(0.01).plan == "tgv-kv:0.2"


def test_of_plans_that_cost_the_same_the_best(write: Write) -> None:
    rows = [
        row("board", "snapkv:0.2", 0.88, 0.9, kv_bytes=199_000),
        row("board", "tgv-kv:0.2", 0.90, 0.9, kv_bytes=200_000),
        row("board", "h2o:0.3", 0.95, 0.9),
    ]
    assert one(write, rows).pick().plan == "tgv-kv:0.2"


def test_a_plan_counts_only_if_all_tasks_know_it(write: Write) -> None:
    rows = [
        row("board", "tgv-kv:0.5", 0.9, 0.9),
        row("board-late", "tgv-kv:0.5", 0.7, 0.8, protocol="late"),
        row("board", "tgv-kv:0.1", 0.9, 0.9),
        row("board-follow-up", "tgv-kv:0.1", 0.9, 0.9, protocol="follow-up"),
        row("haystack-4", "tgv-kv:0.1", 0.9, 0.9, n_images=4),
        row("board-list", "tgv-kv:0.1", 0.9, 0.9, protocol="list"),
        row("reuse", "tgv-kv:0.1", 0.9, 0.9),
    ]
    found = {advice.usage.name: advice for advice in advise(load([write(rows)]), "toy")}
    assert list(found) == [
        "one-shot", "long-answer", "conversation", "many-images", "recurring-images"
    ]  # fmt: skip
    (entry,) = found["one-shot"].entries
    assert entry.plan == "tgv-kv:0.5"
    assert entry.tasks == ("board", "board-late")
    assert entry.difference == pytest.approx(-0.05)
    assert entry.n == 800


def test_controls_stand_beside(write: Write) -> None:
    rows = [
        row("board", "tgv-kv:0.2(of=visual)", 0.9, 0.9),
        row("board", "text-random:0.2(of=visual)", 0.5, 0.9),
        row("board", "text-random:0.3(of=visual)", 0.6, 0.9),
        row("board", "tgv-kv:0.2(of=visual)", 0.1, 0.9, control="wrong-image"),
    ]
    pick = one(write, rows).pick()
    assert pick.chance == pytest.approx(0.5)
    assert pick.wrong_image == pytest.approx(0.1)
    assert not pick.is_control
    rows = [row("board", "text-random:0.2", 0.9, 0.9)]
    assert one(write, rows).pick().is_control


def test_pooled_interval_against_the_formula_on_the_items() -> None:
    """From the rows alone the same comes out as from the scores themselves."""
    rng = np.random.default_rng(1)
    rows, errors, centres = [], [], []
    for n in (150, 400):
        full = (rng.random(n) < 0.9).astype(float)
        ours = np.where(rng.random(n) < 0.2, 1 - full, full)
        paired = ours - full
        rows.append({"n": n, "vs_full": vars(compare(ours.tolist(), full.tolist()))})
        grown = np.concatenate([paired, [-(0.5**0.5), 0.5**0.5]])  # their squares add up to one
        errors.append(grown.var() / (n + 2))
        centres.append(paired.sum() / (n + 2))
    mean, low, high = pooled(rows)
    centre, half = np.mean(centres), 1.96 * math.sqrt(sum(errors)) / 2
    assert mean == pytest.approx(np.mean([r["vs_full"]["mean"] for r in rows]))
    assert low == pytest.approx(centre - half, abs=0.003)
    assert high == pytest.approx(centre + half, abs=0.003)


@pytest.mark.parametrize(
    ("plan", "series"),
    [
        ("tgv-kv:0.2(of=visual)", "tgv-kv(of=visual)"),
        ("tgv-kv:128", "tgv-kv"),
        ("snapkv:64MB(window=16)", "snapkv(window=16)"),
        ("conduit:0.1 + tgv-kv:0.3", "conduit + tgv-kv"),
        ("full", "full"),
    ],
)
def test_series(plan: str, series: str) -> None:
    assert series_of(plan) == series
