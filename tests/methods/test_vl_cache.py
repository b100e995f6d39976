"""VL-Cache against its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.errors import PlanError
from conduit_kv.methods.evict import Scores, VlCache
from tests.methods.views import any_view, best, dense, head_groups, kept_by, make_view


def reference(view, threshold):
    """Per KV head the sums over post-vision rows; and 1 - sparsity, summed over the KV heads."""
    attention = dense(view)
    text = view.layout.text.tolist()
    images = [j for j in range(view.size) if not text[j]]
    rows = view.rows.tolist()
    if images:
        rows = [i for i in rows if i > images[-1]] or [view.size - 1]
    sums = [
        [
            sum(float(attention[h, i, j]) for h in group for i in rows) / len(group)
            for j in range(view.size)
        ]
        for group in head_groups(view)
    ]
    shares = []
    for head in attention:
        dense_entries = visible = 0
        for i in rows:
            largest = max(float(head[i, j]) for j in range(i + 1))
            dense_entries += sum(float(head[i, j]) >= threshold * largest for j in range(i + 1))
            visible += i + 1
        shares.append(dense_entries / visible)
    return sums, sum(shares) / len(shares) * view.kv_heads


@given(any_view(), st.sampled_from([0.0, 0.01, 0.1, 0.5]))
def test_scores_and_sparsity(view, threshold):
    sums, weight = reference(view, threshold)
    scores = VlCache(threshold=threshold).score(view)
    torch.testing.assert_close(
        scores.token.double(), torch.tensor(sums).double(), atol=1e-4, rtol=0
    )
    assert scores.weight == pytest.approx(weight, abs=1e-9)


@given(any_view(), st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.5]))
def test_a_tenth_is_recent(view, budget, recent):
    method = VlCache(recent=recent)
    for head, kept in zip(
        method.score(view).token.tolist(), kept_by(method, view, budget), strict=True
    ):
        new = list(range(view.size))[max(view.size - max(int(recent * budget), 1), 0) :]
        others = best(head, [j for j in range(view.size) if j not in new], budget - len(new))
        assert kept == sorted([*new, *others])


def test_recent_is_a_share_of_the_budget_whatever_it_counts():
    view = make_view([3, (2, 3), 1, (3, 4)])
    method = VlCache(of="visual", recent=0.25)
    for head, kept in zip(method.score(view).token.tolist(), kept_by(method, view, 8), strict=True):
        free = [j for j in range(20) if not view.layout.text[j]]
        assert kept == sorted([0, 1, 2, 9, 20, 21, *best(head, free, 6)])


def test_dense_layers_get_more():
    views = [
        make_view([3, (4, 6), 8], layer=layer, sharp=sharp)
        for layer, sharp in enumerate([0.1, 6.0])
    ]
    method = VlCache()
    scores = [[method.score(view)] for view in views]
    shares = [score.weight for (score,) in scores]
    budgets = method.layer_budgets(40, scores, [35, 35])
    assert budgets[0] > budgets[1] and sum(budgets) == 40
    exact = [40 * share / sum(shares) for share in shares]
    assert all(abs(b - e) < 1 for b, e in zip(budgets, exact, strict=True)) or max(exact) > 35


def test_groups_of_heads_add_up():
    """A layer whose heads hold different tokens claims what it claims as one group."""
    view = make_view([3, (3, 3), 5])
    whole = VlCache().score(view).weight
    parts = 0.0
    for head in range(2):
        part = make_view([3, (3, 3), 5])
        part.keys, part.values = part.keys[head : head + 1], part.values[head : head + 1]
        part.step_queries = part.step_queries[2 * head : 2 * head + 2]
        parts += VlCache().score(part).weight
    assert parts == pytest.approx(whole)
    layers = [[Scores(torch.zeros(9), weight=w) for w in pair] for pair in ((1.0, 3.0), (8.0, 0.0))]
    assert VlCache().layer_budgets(30, layers, [90, 90]) == [10, 20]
    for wrong in ({"threshold": -0.1}, {"recent": 2.0}):
        with pytest.raises(PlanError):
            VlCache(0.5, **wrong)
