"""Plans: read from text, written back, and refused with a remedy."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.budget import Budget
from conduit_kv.errors import PlanError
from conduit_kv.methods import base, registry
from conduit_kv.methods.catalogue import NAMES, find, stage_of
from conduit_kv.methods.evict import H2O, Full, SnapKv, TgvKv
from conduit_kv.plan import Plan


@dataclass(frozen=True)
class Routing(base.Method):
    """A method of another stage, with values that need brackets."""

    name: ClassVar[str] = "test-route"
    stage: ClassVar[str] = "route"

    budget: Budget = field(default=Budget(1.0))
    shares: tuple[float, ...] = ()
    layers: tuple[int, ...] = ()
    rank: Literal["pdrop", "fastv"] = "fastv"
    limit: int | None = None
    exact: bool = False
    scale: float = 1.0

    @property
    def is_identity(self):
        return self.budget.is_everything


@pytest.fixture
def routing(monkeypatch):
    monkeypatch.setitem(base._REGISTRY, "test-route", Routing)


budgets = st.one_of(
    st.floats(0, 1, exclude_min=True, allow_subnormal=False).map(Budget),
    st.integers(1, 10**9).map(lambda n: Budget(float(n), "tokens")),
    st.integers(1, 10**12).map(lambda n: Budget(float(n), "bytes")),
)


@st.composite
def methods(draw, names=tuple(NAMES["evict"])):
    """Any evict method with any values that its fields allow."""
    method = registry()[draw(st.sampled_from(names))]
    hints = typing.get_type_hints(method)
    values = {}
    for option in dataclasses.fields(method):
        hint = hints[option.name]
        if method is Full:
            continue
        if hint is Budget:
            values[option.name] = draw(budgets)
        elif typing.get_origin(hint) is Literal:
            values[option.name] = draw(st.sampled_from(typing.get_args(hint)))
        elif hint is bool:
            values[option.name] = draw(st.booleans())
        elif hint is int:
            values[option.name] = draw(st.integers(0, 50)) * 2 + 1
        elif hint is float and not (method.name == "uniform" and option.name == "cover"):
            values[option.name] = draw(st.floats(0, 1))
    if "every" in values and values["decode"] != "share":
        values["every"] = 1  # the one option that another rules out
    return method(**values)


@given(methods())
def test_text_of_any_method_reads_back(method):
    plan = Plan.of(method)
    assert Plan.parse(str(plan)) == plan
    assert str(Plan.parse(str(plan))) == str(plan)


@given(methods(), budgets, st.lists(st.floats(0, 1)), st.none() | st.integers(-9, 9))
def test_text_of_a_composed_plan_reads_back(evict, budget, shares, limit):
    base._REGISTRY["test-route"] = Routing
    try:
        routing = Routing(budget, tuple(shares), (1, 2), "pdrop", limit, True, 1e-7)
        plan = Plan((evict, routing))
        assert plan.methods == (routing, evict)  # in stage order
        assert Plan.parse(str(plan)) == plan
    finally:
        del base._REGISTRY["test-route"]


def test_reading(routing):
    plan = Plan.parse(
        "tgv-kv:0.2(rows=last, redistribute=no) + test-route:192( shares=[.5,.25],rank=pdrop )"
    )
    assert plan.evict == TgvKv(0.2, rows="last", redistribute=False)
    assert plan.route == Routing(Budget(192, "tokens"), (0.5, 0.25), rank="pdrop")
    assert (plan.reuse, plan.reduce, plan.hold, plan.retrieve) == (None,) * 4
    assert [method.stage for method in plan] == ["route", "evict"]
    assert not plan.is_identity
    assert Plan.parse("snapkv:1.0").is_identity
    assert Plan.parse("snapkv:1").evict.budget == Budget(1, "tokens")
    assert Plan.parse(" h2o : 64MB ").evict.budget == Budget(64e6, "bytes")
    assert Plan.parse("h2o(budget=0.5)") == Plan.parse("h2o(keep=.5)") == Plan.parse("h2o:0.50")
    assert Plan.parse("snapkv:0.2()") == Plan.of(SnapKv(0.2))
    assert Plan.parse("test-route:0.5(shares=[], limit=none)").route == Routing(Budget(0.5))


def test_of():
    plan = Plan.of("h2o:0.2")
    assert Plan.of(plan) is plan
    assert Plan.of(H2O(0.2)) == plan
    assert Plan.of(None) == Plan() == Plan.parse("full")
    assert str(Plan.of(None)) == "full" and Plan.of(None).is_identity
    assert Plan.of(None).evict == Full()
    with pytest.raises(PlanError, match="not int"):
        Plan.of(3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("h2o:0.2 + ", "missing beside"),
        ("+ h2o:0.2", "missing beside"),
        ("tvg-kv:0.2", "did you mean tgv-kv"),
        ("TGV_KV:0.2", "did you mean tgv-kv"),
        ("snap-kv:0.2", "did you mean snapkv"),
        ("kivy:2", "did you mean kivi"),
        ("zzzzzz:0.2", "known are .*tgv-kv"),
        ("h2o:0.2 + snapkv:0.3", "both act in the stage evict"),
        ("full + tova:0.3", "both act in the stage evict"),
        ("h2o", "needs a budget: write h2o:0.2"),
        ("h2o(recent=0.5)", "needs a budget"),
        ("h2o:", "not a number"),
        ("h2o:0", "at least 1"),
        ("h2o:0.0", "not a share"),
        ("h2o:1.7", "not a share in .0, 1."),
        ("h2o:nan", "not a number"),
        ("h2o:inf", "not a number"),
        ("h2o:-0.2", "not a number"),
        ("h2o:-5", "not a number"),
        ("h2o:5XB", "unknown unit"),
        ("h2o:1e400", "not a share"),
        ("full:0.5", "takes no budget: write full alone"),
        ("full(budget=0.5)", "takes no budget"),
        ("h2o:0.2(budget=0.3)", "budget twice"),
        ("h2o(budget=0.2, keep=0.3)", "leave one out"),
        ("h2o:0.2(recnt=0.5)", "did you mean recent"),
        ("h2o:0.2(qqqqq=1)", "no option 'qqqqq': it has"),
        ("h2o:0.2(recent=lots)", "write a number"),
        ("h2o:0.2(recent=nan)", "write a number"),
        ("h2o:0.2(recent=3)", "not a share"),
        ("h2o:0.2(heads=some)", "choose one of each, all"),
        ("snapkv:0.2(window=3.5)", "whole number"),
        ("tgv-kv:0.2(redistribute=perhaps)", "true or false"),
        ("h2o:0.2(recent)", "key=value"),
        ("h2o:0.2(recent=)", "key=value"),
        ("h2o:0.2(=3)", "key=value"),
        ("h2o:0.2(recent=.5,,heads=all)", "key=value"),
        ("h2o:0.2(recent=.5, recent=.6)", "recent twice"),
        ("h2o:0.2(recent=.5", "'\\)' is missing"),
        ("h2o:0.2)", "closes nothing"),
        ("h2o:0.2(recent=[.5)", "closes nothing"),
        ("h2o:0.2(recent=.5)x", "cannot read"),
        ("h2o:0.2:0.3", "'0.2:0.3' is not a number"),
        (":0.2", "name is missing"),
        ("(window=3)", "name is missing"),
        ("h2o 0.2", "unknown method"),
    ],
)
def test_refusals_name_the_remedy(text, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)


@given(st.text(alphabet="h2o:0.5()[]+,= \ntgv-kx", max_size=30))
def test_any_text_is_a_plan_or_a_plan_error(text):
    try:
        plan = Plan.parse(text)
    except PlanError:
        return
    assert Plan.parse(str(plan)) == plan


def test_budget_text():
    for text in ("0.2", "1.0", "0.05", "1e-05", "128", "1"):
        assert str(Budget.parse(text)) == text
    assert str(Budget.parse("64MB")) == "64000000B"
    assert str(Budget.parse("1.5KiB")) == "1536B"


def test_catalogue():
    names = [name for group in NAMES.values() for name in group]
    assert len(names) == len(set(names))
    assert tuple(NAMES) == base.STAGES
    assert stage_of("kivi") == "hold" and stage_of("nothing") is None
    for name, method in registry().items():
        assert stage_of(name) == method.stage
        assert find(name) is method
