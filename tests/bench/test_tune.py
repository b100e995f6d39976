"""The search finds the cheapest plan that is good enough, and does not claim more than it knows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conduit_kv.bench import run as bench_run
from conduit_kv.bench import tune as tuning
from conduit_kv.bench.protocols import Outcome
from conduit_kv.bench.run import Bench, Unit
from conduit_kv.bench.tune import Goal, share_bound, tune
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import InputError
from conduit_kv.plan import Plan

Right = dict[str, float]


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> Right:
    """How often each plan is right: nothing is run. Counts what was asked."""
    known: Right = {"full": 1.0}

    def answer(self: Bench, unit: Unit) -> dict[str, tuple[Outcome, float]]:
        item = self._parts[unit.part].items[unit.number].id
        found = {}
        for plan in unit.plans:
            known["asked"] = known.get("asked", 0) + 1
            share = 1.0 if plan == "full" else float(plan.partition(":")[2].partition("(")[0])
            luck = np.random.default_rng([ord(c) for c in f"{item} {plan}"]).random()
            score = float(luck < known.get(plan, 1.0))
            found[plan] = (Outcome("x", 1, 1, 1, 1, round(1000 * share), 1000), score)
        return found

    monkeypatch.setattr(bench_run.Bench, "answer", answer)
    return known


def plans(*texts: str) -> list[Plan]:
    return [Plan.of(text) for text in texts]


LADDER = plans(*(f"{name}:{share}" for name in ("tgv-kv", "snapkv", "knorm", "uniform")
                 for share in ("0.8", "0.5", "0.3", "0.2", "0.1", "0.05")))  # fmt: skip


def test_finds_the_cheapest_good_plan(vlm: VLM, right: Right) -> None:
    for plan in LADDER:
        right[str(plan)] = 0.4
    right |= {"tgv-kv:0.8": 1.0, "tgv-kv:0.5": 1.0, "tgv-kv:0.3": 1.0, "snapkv:0.8": 1.0}
    said: list[tuple[str, int]] = []
    found = tune(vlm, ["board"], LADDER, Goal(0.95), most=100,
                 progress=lambda what, count: said.append((what, count)))  # fmt: skip
    assert found.plan == "tgv-kv:0.3"
    chosen = found.chosen
    assert chosen and chosen.n == 100
    assert chosen.at_least >= 0.95
    assert "with 95 % confidence at least" in found.statement()
    assert found.rounds[0] == (24, 8)
    assert said[-1][0] == "confirming on 100 fresh items per task"
    # Far less was asked than all plans on all items.
    assert right["asked"] < 25 * 200 / 2


def test_a_lucky_plan_is_not_believed(vlm: VLM, right: Right, monkeypatch: Any) -> None:
    """Right on the items of the search, often wrong on fresh ones."""
    real = bench_run.Bench.answer

    def answer(self: Bench, unit: Unit) -> Any:
        right["tgv-kv:0.1"] = 1.0 if self.settings.seed == 0 else 0.7
        return real(self, unit)

    monkeypatch.setattr(bench_run.Bench, "answer", answer)
    found = tune(vlm, ["board"], plans("tgv-kv:0.5", "tgv-kv:0.1"), Goal(0.95), most=80)
    assert found.plan == "tgv-kv:0.5"
    assert [each.plan for each in found.standings] == ["tgv-kv:0.5", "tgv-kv:0.1"]


def test_nothing_is_claimed_from_few_items(vlm: VLM, right: Right) -> None:
    found = tune(vlm, ["board"], plans("tgv-kv:0.5"), Goal(0.98), first=2, most=4)
    assert found.plan is None
    assert "no plan is shown to keep 98 %" in found.statement()
    assert "tgv-kv:0.5" in found.statement()


def test_bytes(vlm: VLM, right: Right) -> None:
    right |= {"tgv-kv:0.2": 0.5}
    limited = Goal(0.9, max_bytes=500)
    ladder = plans("tgv-kv:0.8", "tgv-kv:0.5", "tgv-kv:0.2")
    found = tune(vlm, ["board"], ladder, limited, most=60)
    assert found.plan == "tgv-kv:0.5"
    assert all(each.kv_bytes <= 500 for each in found.standings)
    with pytest.raises(InputError, match="smallest holds 200"):
        tune(vlm, ["board"], ladder, Goal(0.9, max_bytes=100), most=8)


def test_goes_on_where_it_was(vlm: VLM, right: Right, tmp_path: Path) -> None:
    file = tmp_path / "tune.json"
    one = tune(vlm, ["board"], LADDER, Goal(0.95), most=32, file=file)
    asked = right["asked"]
    assert tune(vlm, ["board"], LADDER, Goal(0.95), most=32, file=file) == one
    assert right["asked"] == asked
    tuning.save(one, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["plan"] == one.plan


def test_what_cannot_be_tuned(vlm: VLM, right: Right) -> None:
    with pytest.raises(InputError, match="do something"):
        tune(vlm, ["board"], plans("full"), Goal())
    with pytest.raises(InputError, match="first is 9"):
        tune(vlm, ["board"], plans("tgv-kv:0.5"), Goal(), first=9, most=8)
    right["full"] = 0.0
    with pytest.raises(InputError, match="none of 8 items"):
        tune(vlm, ["board"], plans("tgv-kv:0.5"), Goal())
    for bad in ({"target": 0}, {"target": 1.5}, {"confidence": 0.4}, {"max_bytes": 0}):
        with pytest.raises(InputError):
            Goal(**bad)


def test_the_bound_covers(vlm: VLM) -> None:
    """The true share lies below the bound in about one case of twenty, not more."""
    rng = np.random.default_rng(0)
    for full, ours, n in ((0.95, 0.9, 100), (0.8, 0.78, 200), (1.0, 0.99, 60)):
        missed = 0
        for _ in range(300):
            theirs = rng.random(n) < full
            keeps = rng.random(n) < ours / full
            missed += share_bound((theirs & keeps).astype(float), theirs.astype(float), 0.95) > (
                ours / full
            )
        assert missed <= 300 * 0.06 + 2.5 * np.sqrt(300 * 0.06 * 0.94)


def test_the_bound_by_trying_shares() -> None:
    ours, theirs = [1.0] * 90 + [0.0] * 10, [1.0] * 95 + [0.0] * 5
    found = share_bound(ours, theirs, 0.95)

    def lower(share: float) -> float:
        d = np.array([a - share * b for a, b in zip(ours, theirs, strict=True)])
        d = np.append(d, -1.0)  # one lost item more
        return float(d.mean() - 1.6448536 * d.std() / np.sqrt(len(d)))

    grid: Sequence[float] = np.linspace(0, 1.2, 2401)
    check: Callable[[float], bool] = lambda share: lower(share) >= 0  # noqa: E731
    assert found == pytest.approx(max(share for share in grid if check(share)), abs=1e-3)
