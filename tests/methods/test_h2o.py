"""H2O against its formula: sums over all rows, heavy and recent tokens, sums in decoding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.errors import PlanError
from conduit_kv.methods.evict import H2O
from tests.methods.views import (
    any_view,
    best,
    decode,
    dense,
    head_groups,
    kept_by,
    make_view,
    step_views,
)


def sums(view):
    """Per KV head, attention received from all rows, mean over the head's query heads."""
    attention = dense(view)
    return torch.stack([attention[group].mean(0).sum(0) for group in head_groups(view)])


@given(any_view(), st.integers(1, 40), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_heavy_and_recent(view, budget, recent):
    score = sums(view)
    found = H2O(recent=recent).score(view)
    torch.testing.assert_close(found.token.double(), score, atol=1e-4, rtol=0)
    assert torch.equal(found.carry, found.token)
    for head, kept in zip(
        found.token.tolist(), kept_by(H2O(recent=recent), view, budget), strict=True
    ):
        size = view.size
        new = list(range(size))[max(size - max(int(recent * budget), 1), 0) :]
        heavy = best(head, [j for j in range(size) if j not in new], budget - len(new))
        assert kept == sorted([*new, *heavy])[:size]


@given(any_view(), st.integers(1, 40))
def test_all_heads_keep_the_same(view, budget):
    mean = H2O().score(view).token.mean(0)
    (kept,) = kept_by(H2O(heads="all"), view, budget)
    new = list(range(view.size))[max(view.size - max(budget // 2, 1), 0) :]
    heavy = best(mean.tolist(), [j for j in range(view.size) if j not in new], budget - len(new))
    assert kept == sorted([*new, *heavy])


def test_recent_is_a_share_of_the_budget_whatever_it_counts():
    view = make_view([3, (2, 3), 1, (3, 4)])
    for method in (H2O(of="visual"), H2O(of="visual", recent=0.25)):
        sums = method.score(view).token
        new = list(range(22))[-int(method.recent * 8) :]
        for head, kept in zip(sums.tolist(), kept_by(method, view, 8), strict=True):
            free = [j for j in range(22) if not view.layout.text[j] and j not in new]
            assert kept == sorted([0, 1, 2, 9, *new, *best(head, free, 8 - len(new))])


def test_sums_go_on_over_turns_and_decoded_tokens():
    """Column sums over all rows of the whole sequence, whatever the steps it came in."""
    whole = make_view([5, (2, 3), 4, 1, 1])
    expected = H2O().score(whole).carry
    method = H2O(0.99)

    def part(stop, rows, carried):
        view = make_view([5, (2, 3), 4, 1, 1])
        view.index, view.layout = view.index[:stop], view.layout.select(torch.arange(stop))
        view.keys, view.values = view.keys[:, :stop], view.values[:, :stop]
        view.step_queries = view.step_queries[:, stop - rows : stop]
        view.carried = torch.nn.functional.pad(carried, (0, rows))
        return view

    carry = method.score(part(11, 11, torch.zeros(2, 0))).carry
    carry = method.score(part(15, 4, carry)).carry
    carry = method.score_step(part(16, 1, carry)).carry
    carry = method.score_step(part(17, 1, carry)).carry
    torch.testing.assert_close(carry, expected)


PARTS = [5, (3, 4), 6]


def test_decode_drops_the_smallest_sum_that_is_not_recent():
    steps, method = 10, H2O(12, heads="all")
    options = {"kv_heads": 1, "heads": 2}
    views, start = step_views(PARTS, steps, **options), make_view(PARTS, **options)
    trace = decode(method, views, start, steps)
    total = torch.zeros(23 + steps, dtype=torch.float64)
    total[:23] = sums(start)[0]
    held = torch.tensor(kept_by(method, start, 12)[0])
    for step, (before, target, after) in enumerate(trace):
        now = torch.cat([held, torch.tensor([23 + step])])
        assert (before, target) == (13, 12)
        total[now] += dense(views(now, torch.zeros(1, len(now)))).mean(0)[-1]
        gone = best((-total[now]).tolist(), range(before - 6), 1)
        assert after.tolist() == [j for i, j in enumerate(now.tolist()) if i not in gone]
        held = after


def test_options():
    view = make_view(PARTS, rows=1)
    assert not H2O(10, decode="off").scores_steps
    # Visual tokens alone never grow in decoding, but the sums go on.
    step = H2O(10, of="visual").score_step(view)
    assert (step.tier == 127).all() and float(step.carry.sum()) == pytest.approx(2, abs=1e-5)
    with pytest.raises(PlanError, match="recent"):
        H2O(10, recent=1.5)
