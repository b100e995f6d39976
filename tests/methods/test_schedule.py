"""Schedules: published ones, and targets met in whole tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.engine.cost import Cost
from conduit_kv.errors import PlanError
from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.base import registry
from conduit_kv.methods.schedule import Schedule, equal, halving, powers, solve, solve_cost
from tests.contracts.helpers import examples

LLAVA = Cost(hidden=4096, heads=32, kv_heads=32, head_dim=128, mlp=11008)
"""LLaVA-1.5-7B."""

PUBLISHED = {
    # stages, shape, average tokens of 576 over 32 layers, published shares
    "fastv 192": ([3], equal, 192, [0.2644]),
    "fastv 128": ([3], equal, 128, [0.1418]),
    "fastv 64": ([3], equal, 64, [0.01916]),
    "pdrop 192": ([2, 7, 15, 23], powers, 192, [0.5965, 0.3558, 0.2123, 0.1266]),
    "pdrop 128": ([2, 7, 15, 23], powers, 128, [0.4570, 0.2088, 0.0954, 0.0436]),
    "reroute 192": ([2, 7, 15, 23], halving, 192, [0.4502, 0.4502, 0.2251, 0.1126]),
    "reroute 128": ([2, 7, 15, 23], halving, 128, [0.2655, 0.2655, 0.1328, 0.0664]),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schedules_come_out(name):
    layers, shape, tokens, shares = PUBLISHED[name]
    found = solve(name, 32, 576, layers, shape, tokens)
    assert [count / 576 for count in found.counts] == pytest.approx(shares, abs=1 / 576)
    longest = max(b - a for a, b in zip(layers, [*layers[1:], 32], strict=True))
    assert abs(32 * found.average - 32 * tokens) <= longest / 2
    given_shares = Schedule(tuple(layers), tuple(int(576 * share) for share in shares), 32, 576)
    assert given_shares.average == pytest.approx(tokens, abs=1)
    assert f"= {found.average:.1f} of 576" in found.formula()


def test_what_is_published_as_64_tokens_for_pdrop_is_not():
    """At [2, 7, 15, 23] no schedule reaches 64: two dense layers and one token after are 36.9."""
    found = solve("pdrop", 32, 576, [2, 7, 15, 23], powers, 64)
    assert found.average == pytest.approx(64, abs=0.2)


@pytest.mark.parametrize(("name", "waits", "layers"), [
    ("fastv", False, {32: (2,), 30: (2,), 4: (2,)}),
    ("pdrop", True, {32: (2, 8, 16, 24), 28: (2, 7, 14, 21), 30: (2, 8, 15, 23), 4: (1, 2, 3)}),
    ("nuwa", True, {32: (16, 20, 24, 28), 4: (2, 3)}),
    ("fastv", True, {32: (2, 8, 16, 24), 28: (2, 7, 14, 21), 2: (1,)}),
])  # fmt: skip
def test_stages_at_any_depth(name, waits, layers):
    method = registry()["reroute" if waits else "delete"](rank=name, budget=0.5)
    for depth, expected in layers.items():
        assert method.stages(depth) == expected


@examples(300)
@given(
    n_layers=st.integers(2, 60),
    visual=st.integers(1, 4000),
    places=st.sets(st.floats(0.0, 0.999), min_size=1, max_size=5),
    shape=st.sampled_from([equal, powers, halving]),
    share=st.floats(0.001, 0.999),
)
def test_any_target_is_met_within_half_of_the_longest_stage(n_layers, visual, places, shape, share):
    layers = sorted({int(place * n_layers) for place in places})
    lengths = [b - a for a, b in zip(layers, [*layers[1:], n_layers], strict=True)]
    least = visual * layers[0] + sum(lengths)
    total = share * visual * n_layers
    if total < least - max(lengths) / 2:
        with pytest.raises(PlanError, match=f"The smallest is {least / n_layers:.1f} tokens"):
            solve("x", n_layers, visual, layers, shape, share * visual)
        return
    found = solve("x", n_layers, visual, layers, shape, share * visual)
    assert abs(sum(found.per_layer) - total) <= max(lengths) / 2 + 1e-6
    assert all(1 <= count <= visual for count in found.counts)
    assert list(found.counts) == sorted(found.counts, reverse=True)
    assert len(found.per_layer) == n_layers


@pytest.mark.parametrize("shape", [equal, powers, halving])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_target_in_flops_is_met_from_below(shape, share):
    def flops(visual):
        return LLAVA.prefill([60 + count for count in visual]).total

    found = solve_cost("x", 32, 576, [2, 8, 16, 24], shape, flops, share)
    full = flops([576] * 32)
    assert share - 0.01 < flops(found.per_layer) / full <= share


def test_flops_by_hand():
    """Three tokens through one layer after two older ones."""
    cost = Cost(hidden=6, heads=4, kv_heads=2, head_dim=3, mlp=10)
    found = cost.prefill([3], older=2)
    projections = 3 * 2 * (6 * 12 + 6 * 6 + 6 * 6 + 12 * 6)
    keys = (2 + 1) + (2 + 2) + (2 + 3)
    assert found.attention == projections + keys * 2 * 2 * 12
    assert found.mlp == 3 * 3 * 2 * 6 * 10
    assert cost.ranking(3).total == 3 * 2 * 6 * 24 + 3 * 2 * 12


def test_another_name_for_a_budget_in_tokens():
    reroute = registry()["reroute"]
    assert reroute(avg_tokens=192) == reroute(budget=192)
    assert str(reroute(avg_tokens=192)) == "reroute:192"
    layout = Layout.of(__import__("torch").ones(576, dtype=bool), [Grid(1, 24, 24)])
    found = reroute(avg_tokens=192).schedule(32, layout, lambda counts: 0.0)
    assert found.average == pytest.approx(192, abs=0.2)
