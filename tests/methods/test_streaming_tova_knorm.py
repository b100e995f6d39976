"""StreamingLLM, TOVA and KNorm against their formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.errors import PlanError
from conduit_kv.methods.evict import PROTECTED, KNorm, StreamingLlm, Tova
from tests.methods.views import any_view, best, decode, dense, kept_by, make_view, step_views

PARTS = [5, (3, 4), 6]


@given(any_view(), st.integers(0, 40), st.integers(0, 6))
def test_streaming_keeps_sinks_and_the_newest(view, budget, sinks):
    first = [j for j in range(view.size) if view.index[j] < sinks]
    others = [j for j in range(view.size) if j not in first]
    newest = others[max(len(others) - max(budget - len(first), 0), 0) :]
    assert kept_by(StreamingLlm(sinks=sinks), view, budget) == [sorted(first + newest)]


def test_streaming_slides_in_decoding():
    trace = decode(StreamingLlm(10), step_views(PARTS, 8), make_view(PARTS), 8)
    for step, (_, _, held) in enumerate(trace):
        assert held.tolist() == [0, 1, 2, 3, *range(18 + step, 24 + step)]
    assert not StreamingLlm(10, decode="off").scores_steps
    assert not StreamingLlm(10, of="visual").scores_steps
    with pytest.raises(PlanError, match="negative"):
        StreamingLlm(10, sinks=-1)


@given(any_view(), st.integers(1, 40))
def test_tova_keeps_what_the_last_row_attends_to(view, budget):
    attention = dense(view).mean(0)[-1]
    scores = Tova().score(view)
    torch.testing.assert_close(scores.token.double(), attention, atol=1e-6, rtol=0)
    last = view.size - 1
    assert scores.tier.tolist() == [0] * last + [PROTECTED]
    expected = [last, *best(scores.token.tolist(), range(last), budget - 1)]
    assert kept_by(Tova(), view, budget) == [sorted(expected)]


def test_tova_goes_on_in_decoding():
    views = step_views(PARTS, 8)
    trace = decode(Tova(12), views, make_view(PARTS), 8)
    held = torch.tensor(kept_by(Tova(12), make_view(PARTS), 12)[0])
    for step, (before, _, after) in enumerate(trace):
        now = torch.cat([held, torch.tensor([23 + step])])
        attention = dense(views(now, torch.zeros(1, len(now)))).mean(0)[-1]
        gone = best((-attention).tolist(), range(before - 1), 1)
        assert after.tolist() == [j for i, j in enumerate(now.tolist()) if i not in gone]
        held = after
    assert not Tova(10, decode="off").scores_steps
    assert not Tova(10, of="visual").scores_steps


@given(any_view(), st.integers(0, 40))
def test_knorm_keeps_small_keys_of_each_head(view, budget):
    heads = kept_by(KNorm(), view, budget)
    for keys, kept in zip(view.keys, heads, strict=True):
        norms = [sum(float(x) ** 2 for x in key) ** 0.5 for key in keys]
        assert kept == sorted(best([-n for n in norms], range(view.size), budget))
    assert len(heads) == view.kv_heads
    assert not KNorm().scores_steps
