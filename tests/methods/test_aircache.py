"""AirCache against its (reconstructed) formula."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.errors import PlanError
from conduit_kv.methods.evict import AirCache, Scores
from tests.methods.views import any_view, best, dense, kept_by, make_view


def reference(view, alpha):
    attention = dense(view)
    text = view.layout.text.tolist()
    first = next((j for j in range(view.size) if not text[j]), view.size)
    rows = [i for i in view.rows.tolist() if text[i] and i > first] or [view.size - 1]
    last = rows[-1]
    telling = []
    for t in rows:
        shares = [
            float(head[last, t]) / sum(float(head[last, u]) for u in rows) for head in attention
        ]
        telling.append(sum(shares) / len(shares))
    elite = [t for t, a in zip(rows, telling, strict=True) if a >= alpha * max(telling)]
    mean = attention.mean(0)
    return [
        float(mean[last, j]) if text[j] else sum(float(mean[i, j]) for i in elite) / len(elite)
        for j in range(view.size)
    ], elite


@given(any_view(), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_scores_by_the_elite(view, alpha):
    score, _ = reference(view, alpha)
    found = AirCache(alpha=alpha).score(view).token
    torch.testing.assert_close(found.double(), torch.tensor(score).double(), atol=1e-5, rtol=0)


def test_the_last_text_token_tells_even_where_an_image_is_last():
    view = make_view([3, (2, 3), 4, (2, 2)], sharp=3.0)
    score, _ = reference(view, 0.5)
    found = AirCache(alpha=0.5).score(view).token
    torch.testing.assert_close(found.double(), torch.tensor(score).double(), atol=1e-5, rtol=0)


def test_fewer_rows_than_all_observe():
    view = make_view([3, (3, 3), 9], sharp=3.0)
    assert 1 <= len(reference(view, 0.9)[1]) < len(reference(view, 0.0)[1]) == 9


@given(any_view(), st.integers(1, 40))
def test_text_first(view, budget):
    scores = AirCache().score(view)
    text = view.layout.text.tolist()
    always = [j for j in range(view.size) if view.index[j] < 4 or j == view.size - 1]
    free = [j for j in range(view.size) if j not in always]
    rest = budget - len(always)
    words = best(scores.token.tolist(), [j for j in free if text[j]], rest)
    looks = best(scores.token.tolist(), [j for j in free if not text[j]], rest - len(words))
    assert kept_by(AirCache(), view, budget) == [sorted([*always, *words, *looks])]


def skew(values):
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    if not deviation:
        return 0.0
    return max(statistics.fmean(((v - mean) / deviation) ** 3 for v in values), 0.0)


@given(st.integers(1, 5), st.integers(3, 30), st.floats(0.1, 0.9), st.integers(0, 10**6))
def test_budgets_by_strength_and_skew(layers, visual, share, seed):
    random = torch.Generator().manual_seed(seed)
    power = torch.randint(1, 5, (layers, 1), generator=random)
    token = torch.rand(layers, visual, generator=random) ** power
    words = torch.ones(7)
    tier = torch.cat([torch.ones(7), torch.zeros(visual)]).to(torch.int8)
    scores = [[Scores(torch.cat([words, t]), tier)] for t in token]
    total = round(share * layers * visual) + 7 * layers
    budgets = AirCache().layer_budgets(total, scores, [7 + visual] * layers)
    strengths = [sum(t.tolist()) for t in token]
    skews = [skew(t.tolist()) for t in token]
    exact = [
        (total - 7 * layers)
        / 2
        * (s / sum(strengths) + (k / sum(skews) if sum(skews) else 1 / layers))
        for s, k in zip(strengths, skews, strict=True)
    ]
    assert sum(budgets) == total
    if max(exact) < visual:
        assert all(abs(b - 7 - e) < 1 + 1e-6 for b, e in zip(budgets, exact, strict=True))


def test_budgets_below_the_text_are_even():
    tier = torch.cat([torch.ones(20), torch.zeros(10)]).to(torch.int8)
    scores = [[Scores(torch.rand(30), tier)] for _ in range(3)]
    assert AirCache().layer_budgets(30, scores, [30] * 3) == [10, 10, 10]
    visual = AirCache(of="visual").layer_budgets(12, scores, [10] * 3)
    assert sum(visual) == 12
    with pytest.raises(PlanError, match="alpha"):
        AirCache(0.5, alpha=1.1)
