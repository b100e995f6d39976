"""SnapKV, PyramidKV and Ada-KV against their formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.errors import PlanError
from conduit_kv.methods.evict import AdaKv, PyramidKv, Scores, SnapKv
from tests.methods.views import any_view, best, dense, head_groups, kept_by, make_view, same_view


def pooled(values, kernel, pool):
    """Each value's neighbourhood: mean with zeros outside, or maximum of what is inside."""
    half = kernel // 2
    out = []
    for j in range(len(values)):
        near = [values[i] for i in range(j - half, j + half + 1) if 0 <= i < len(values)]
        out.append(sum(near) / kernel if pool == "mean" else max(near))
    return out


def reference(view, window, kernel, pool):
    """Per KV head: scores of the columns before the window."""
    attention = dense(view)
    rows = view.rows.tolist()[-window:]
    before = view.size - len(rows)
    heads = []
    for group in head_groups(view):
        each = []
        for head in group:
            mean = [
                sum(float(attention[head, i, j]) for i in rows) / len(rows) for j in range(before)
            ]
            each.append(pooled(mean, kernel, pool))
        heads.append([sum(column) / len(each) for column in zip(*each, strict=True)])
    return heads, before


snap_options = {
    "window": st.integers(1, 8),
    "kernel": st.sampled_from([1, 3, 5]),
    "pool": st.sampled_from(["mean", "max"]),
}


@given(any_view(), st.integers(1, 40), st.fixed_dictionaries(snap_options))
def test_snapkv_keeps_the_window_and_what_it_attends_to(view, budget, options):
    heads, before = reference(view, **options)
    scores = SnapKv(**options).score(view)
    torch.testing.assert_close(
        scores.token[:, :before].double(),
        torch.tensor(heads).double().view(view.kv_heads, before),
        atol=1e-5,
        rtol=0,
    )
    assert scores.tier.tolist() == [0] * before + [1] * (view.size - before)
    kept = kept_by(SnapKv(**options), view, budget)
    for found, tokens in zip(scores.token.tolist(), kept, strict=True):
        window = list(range(before, view.size))[-budget:]
        others = best(found, range(before), budget - len(window))
        assert tokens == sorted([*window, *others])


def test_snapkv_is_per_kv_head():
    view = make_view([3, (6, 6), 6], sharp=4.0)
    first, second = kept_by(SnapKv(window=3), view, 12)
    assert first != second and len(first) == len(second) == 12


@pytest.mark.parametrize("wrong", [{"window": 0}, {"kernel": 4}, {"kernel": 0}, {"pool": "sum"}])
def test_snapkv_options(wrong):
    with pytest.raises(PlanError):
        SnapKv(0.5, **wrong)


def plain(layers):
    return [[Scores(torch.zeros(1))] for _ in range(layers)]


def slow_pyramid(total, layers, length, window, beta, schedule):
    """Budgets before rounding, from the papers' formulas; None where all layers are alike."""
    mean = total / layers - (window if schedule == "paper" else 0)
    if mean <= 0:
        return None
    low = mean / beta
    high = 2 * mean - low
    if high >= length - window:
        high = length - window
        low = 2 * mean - high
    if schedule == "kvpress" and not length >= high >= low >= window:
        return None
    extra = window if schedule == "paper" else 0
    return [extra + high - i * (high - low) / (layers - 1) for i in range(layers)]


@given(
    st.integers(2, 12),
    st.integers(20, 300),
    st.integers(1, 16),
    st.integers(1, 30),
    st.floats(0.05, 0.95),
    st.sampled_from(["paper", "kvpress"]),
)
def test_pyramid_budgets(layers, length, window, beta, share, schedule):
    total = round(share * layers * length)
    method = PyramidKv(window=window, beta=beta, schedule=schedule)
    budgets = method.layer_budgets(total, plain(layers), [length] * layers)
    expected = slow_pyramid(total, layers, length, window, beta, schedule)
    if expected is None:
        expected = [total / layers] * layers
    assert sum(budgets) == max(total, 5 * layers)
    if min(expected) >= 5 and max(expected) <= length:
        for found, exact in zip(budgets, expected, strict=True):
            assert abs(found - exact) < 1 + 1e-6
    assert budgets == sorted(budgets, reverse=True) or schedule == "kvpress" or min(expected) < 5


def test_pyramid_falls_with_depth_and_scores_as_snapkv():
    # r = 60 - 8 = 52 a layer: 101.4, 68.5, 35.5 and 52 / 20 = 2.6, with 8 on top of each.
    assert PyramidKv(window=8).layer_budgets(240, plain(4), [400] * 4) == [109, 76, 44, 11]
    # 60 a layer: 90, 70, 50 and 60 / 2 = 30.
    line = PyramidKv(window=2, beta=2, schedule="kvpress")
    assert line.layer_budgets(240, plain(4), [400] * 4) == [90, 70, 50, 30]
    # 117, 79, 41 and 3: the last layer is raised to the floor at the others' expense.
    line = PyramidKv(window=2, schedule="kvpress")
    assert line.layer_budgets(240, plain(4), [400] * 4) == [116, 78, 41, 5]
    even = PyramidKv(window=32, schedule="kvpress").layer_budgets(240, plain(4), [400] * 4)
    assert even == [60] * 4
    # A budget that does not hold the windows: all layers alike.
    assert PyramidKv(window=32).layer_budgets(80, plain(4), [400] * 4) == [20] * 4
    # Over visual tokens alone there is no window: r = 30, from 2 * 30 - 3 to 30 / 10.
    visual = PyramidKv(window=8, beta=10, of="visual")
    assert visual.layer_budgets(120, plain(4), [100] * 4) == [57, 39, 21, 3]
    view = make_view([3, (4, 4), 8])
    assert torch.equal(PyramidKv(window=4).score(view).token, SnapKv(window=4).score(view).token)
    with pytest.raises(PlanError, match="beta"):
        PyramidKv(0.5, beta=0)


def slow_ada(scores, tiers, budget, alpha):
    """Kept tokens per head: its own best first, then the best pairs of the layer."""
    size = len(tiers)
    key = [
        {j: (-tiers[j], -head[j], number, j) for j in range(size)}
        for number, head in enumerate(scores)
    ]
    kept = [sorted(range(size), key=mine.get)[: int(alpha * budget)] for mine in key]
    pairs = sorted((mine[j], number, j) for number, mine in enumerate(key) for j in range(size))
    places = budget * len(scores) - sum(map(len, kept))
    for _, number, j in pairs:
        if places and j not in kept[number]:
            kept[number].append(j)
            places -= 1
    return [sorted(mine) for mine in kept]


@given(any_view(), st.integers(1, 40), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.booleans())
def test_ada_kv_is_one_choice_over_the_heads(view, budget, alpha, apart):
    budget = min(budget, view.size)
    method = AdaKv(window=3, alpha=alpha)
    scores = method.score(view)
    expected = slow_ada(scores.token.tolist(), scores.tier.tolist(), budget, alpha)
    if apart:
        # As in a later turn: each head is a group of its own.
        groups = [
            (
                same_view(view, keys=view.keys[g : g + 1], values=view.values[g : g + 1]),
                Scores(scores.token[g : g + 1], scores.tier),
            )
            for g in range(view.kv_heads)
        ]
        found = [kept[0].tolist() for kept in method.select(groups, budget)]
    else:
        (heads,) = method.select([(view, scores)], budget)
        found = [kept.tolist() for kept in heads]
    assert found == expected
    assert sum(map(len, found)) == budget * view.kv_heads


def test_ada_kv_gives_heads_different_numbers():
    view = make_view([3, (6, 6), 6], sharp=4.0, seed=1)
    view.step_queries[:2] *= 0.01  # the first KV head attends evenly, so nothing stands out
    first, second = kept_by(AdaKv(window=2), view, 12)
    assert len(first) < 12 < len(second) and len(first) + len(second) == 24
    assert len(kept_by(AdaKv(window=2, alpha=1.0), view, 12)[0]) == 12
    with pytest.raises(PlanError, match="alpha"):
        AdaKv(0.5, alpha=2.0)


@given(any_view(), st.integers(0, 20), st.sampled_from([0.0, 0.2, 0.6]))
def test_ada_kv_of_visual_counts_only_those(view, budget, alpha):
    budget = min(budget, int(view.layout.visual.sum()))
    method = AdaKv(of="visual", window=3, alpha=alpha)
    scores = method.score(view)
    text = view.layout.text.tolist()
    tiers = [127 if is_text else tier for is_text, tier in zip(text, scores.tier, strict=True)]
    tiers = [int(tier) for tier in tiers]
    expected = slow_ada(scores.token.tolist(), tiers, budget + sum(text), alpha)
    (heads,) = method.select([(view, scores)], budget)
    assert [kept.tolist() for kept in heads] == expected
    assert sum(not text[j] for kept in heads for j in kept.tolist()) == budget * view.kv_heads


@pytest.mark.parametrize("budget", [2, 6, 20])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.6])
def test_ada_kv_of_visual_between_an_even_and_a_sharp_head(alpha, budget):
    view = make_view([5, (6, 6), 4], sharp=30.0, seed=1)
    view.step_queries[:2] *= 0.0003
    method = AdaKv(of="visual", window=2, kernel=1, alpha=alpha)
    scores = method.score(view)
    tiers = [127 if is_text else 0 for is_text in view.layout.text.tolist()]
    kept = kept_by(method, view, budget)
    assert kept == slow_ada(scores.token.tolist(), tiers, budget + 9, alpha)
    if (alpha, budget) == (0.6, 20):
        # The sharp head has few tokens that stand out, and what it gets in any case.
        assert [len(tokens) for tokens in kept] == [2 * 29 - 17, int(0.6 * 29)]


def test_ada_kv_over_groups_of_several_heads():
    view = make_view([3, (5, 6), 6], kv_heads=3, heads=3, sharp=4.0)
    view.step_queries[0] *= 0.01
    method = AdaKv(window=2)
    scores = method.score(view)
    (whole,) = method.select([(view, scores)], 12)
    groups = [
        (
            same_view(view, keys=view.keys[part], values=view.values[part]),
            Scores(scores.token[part], scores.tier),
        )
        for part in (slice(0, 2), slice(2, 3))
    ]
    first, second = method.select(groups, 12)
    assert [k.tolist() for k in whole] == [k.tolist() for k in (*first, *second)]
    assert len({len(k) for k in whole}) > 1
