"""PrefixKV against its formula: the threshold found by bisection, as in the paper."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.methods.evict import PROTECTED, PrefixKv, Scores
from tests.methods.views import any_view, best, dense, kept_by, make_view


@given(any_view(), st.integers(0, 40))
def test_column_sums_sinks_and_last(view, budget):
    attention = dense(view).mean(0)
    scores = PrefixKv().score(view)
    torch.testing.assert_close(scores.token.double(), attention.sum(0), atol=1e-4, rtol=0)
    always = [j for j in range(view.size) if view.index[j] < 4 or j == view.size - 1]
    free = [j for j in range(view.size) if j not in always]
    others = best(scores.token.tolist(), free, budget - len(always))
    assert kept_by(PrefixKv(), view, budget) == [sorted([*always, *others])]


def prefix(mass, p, floor):
    """Tokens of one layer, largest first, until they hold a share ``p`` of its sum."""
    ordered = sorted(mass, reverse=True)
    held, count = 0.0, 0
    while count < len(ordered) and held < p * sum(mass):
        held += ordered[count]
        count += 1
    return max(count, floor)


def bisected(masses, total, floor):
    """The largest budgets under one threshold that fit."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        fits = sum(prefix(mass, middle, min(floor, len(mass))) for mass in masses) <= total
        low, high = (middle, high) if fits else (low, middle)
    return [prefix(mass, low, min(floor, len(mass))) for mass in masses]


@given(st.integers(1, 6), st.integers(6, 40), st.floats(0.05, 1.0), st.integers(0, 10**6))
def test_one_threshold_for_all_layers(layers, size, share, seed):
    random = torch.Generator().manual_seed(seed)
    power = torch.randint(1, 6, (layers, 1), generator=random)
    token = torch.rand(layers, size, generator=random, dtype=torch.float64) ** power
    total = round(share * layers * size)
    method = PrefixKv()
    budgets = method.layer_budgets(total, [[Scores(t)] for t in token], [size] * layers)
    floor = min(5, size)
    expected = bisected(token.tolist(), total, floor)
    assert sum(budgets) == max(total, floor * layers)
    if floor * layers < total:
        assert budgets == expected


def test_even_attention_needs_more_tokens():
    sharp = torch.tensor([20.0, 10, 5, 2, 1, 1, 1, 1, 1, 1])
    budgets = PrefixKv().layer_budgets(14, [[Scores(sharp)], [Scores(torch.ones(10))]], [10, 10])
    assert budgets == [5, 9]


def test_sums_go_on_and_visual_budgets_count_visual_tokens():
    carried = torch.full((2, 12), 0.5)
    view = make_view([4, (2, 2), 4], rows=2, carried=carried)
    alone = make_view([4, (2, 2), 4], rows=2)
    torch.testing.assert_close(PrefixKv().score(view).token, PrefixKv().score(alone).token + 0.5)
    assert PrefixKv().score(view).carry.shape == (1, 12)
    views = [make_view([4, (3, 3), 4], layer=layer) for layer in range(3)]
    method = PrefixKv(0.5, of="visual")
    scores = [[method.score(view)] for view in views]
    assert all(
        torch.equal(s.tier == PROTECTED, v.layout.text)
        for (s,), v in zip(scores, views, strict=True)
    )
    budgets = method.layer_budgets(13, scores, [9] * 3)
    masses = [s.token[~v.layout.text].tolist() for (s,), v in zip(scores, views, strict=True)]
    assert budgets == bisected(masses, 13, 0) and sum(budgets) == 13
    (kept,) = method.select([(views[0], scores[0][0])], budgets[0])[0]
    assert len(kept) == 8 + budgets[0]
