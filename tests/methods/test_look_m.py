"""LOOK-M against its formula: text first, evicted K/V folded into the most similar kept key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.errors import PlanError
from conduit_kv.methods.evict import H2O, LookM
from tests.methods.views import any_view, best, kept_by, make_view


@given(any_view(), st.integers(1, 40), st.sampled_from([0.1, 0.5]))
def test_recent_then_text_then_heavy(view, budget, recent):
    method = LookM(recent=recent)
    sums = H2O().score(view).token
    torch.testing.assert_close(method.score(view).token, sums)
    text = view.layout.text.tolist()
    for head, kept in zip(sums.tolist(), kept_by(method, view, budget), strict=True):
        new = list(range(view.size))[max(view.size - max(int(recent * budget), 1), 0) :]
        rest = budget - len(new)
        words = best(head, [j for j in range(view.size) if text[j] and j not in new], rest)
        looks = [j for j in range(view.size) if not text[j] and j not in new]
        assert kept == sorted([*new, *words, *best(head, looks, rest - len(words))])


def test_recent_is_a_share_of_the_budget_whatever_it_counts():
    view = make_view([3, (2, 3), 1, (3, 4)])
    method = LookM(of="visual", recent=0.25)
    for head, kept in zip(method.score(view).token.tolist(), kept_by(method, view, 8), strict=True):
        free = [j for j in range(20) if not view.layout.text[j]]
        assert kept == sorted([0, 1, 2, 9, 20, 21, *best(head, free, 6)])


def test_sums_go_on_over_turns():
    carried = torch.rand(2, 12)
    view = make_view([4, (2, 2), 4], rows=2, carried=carried)
    alone = make_view([4, (2, 2), 4], rows=2)
    scores = LookM().score(view)
    torch.testing.assert_close(scores.token, LookM().score(alone).token + carried)
    assert torch.equal(scores.carry, scores.token)


def slow_merge(keys, values, kept, how):
    """One head's K and V ``[S, d]`` after merging, in loops."""
    gone = [j for j in range(len(keys)) if j not in kept]
    comers = {c: [] for c in kept}
    for e in gone:
        cosines = [float(torch.cosine_similarity(keys[e], keys[c], dim=0)) for c in kept]
        comers[kept[cosines.index(max(cosines))]].append((e, max(cosines)))
    new_keys, new_values = keys.clone(), values.clone()
    for c, evicted in comers.items():
        for new, old in ((new_keys, keys), (new_values, values)):
            terms = [old[c]]
            for e, cosine in evicted:
                term = {
                    "average": old[e],
                    "pivot": (old[e] + old[c]) / 2,
                    "weighted": old[e] * cosine,
                }[how]
                terms.append(term)
            new[c] = sum(terms) / len(terms)
    return new_keys, new_values


@given(any_view(), st.integers(1, 20), st.sampled_from(["average", "pivot", "weighted"]))
def test_evicted_are_folded_into_the_most_similar(view, budget, how):
    method = LookM(merge_by=how)
    kept = [torch.tensor(tokens) for tokens in kept_by(method, view, budget)]
    merged = method.merge(view, kept)
    if budget >= view.size:
        assert merged is None
        return
    for head, tokens in enumerate(kept):
        keys, values = slow_merge(
            view.keys[head].double(), view.values[head].double(), tokens.tolist(), how
        )
        torch.testing.assert_close(merged[0][head].double(), keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(merged[1][head].double(), values, atol=1e-5, rtol=1e-5)


def test_merging_in_blocks_and_for_heads_alike(monkeypatch):
    view = make_view([3, (4, 4), 5])
    kept = [torch.tensor([0, 5, 9, 20, 23])]
    whole = LookM().merge(view, kept)
    assert whole[0].shape == view.keys.shape
    monkeypatch.setattr("conduit_kv.methods.evict.look_m._BLOCK", 3)
    for old, new in zip(whole, LookM().merge(view, kept * 2), strict=True):
        torch.testing.assert_close(old, new)


def test_no_merging_where_nothing_goes_or_none_is_wanted():
    view = make_view([3, (2, 2), 3])
    some, every = [torch.arange(4)], [torch.arange(10)]
    assert LookM(merge_by="none").merge(view, some) is None
    assert LookM().merge(view, every) is None
    assert LookM().merge(view, some) is not None
    before = view.keys.clone()
    LookM().merge(view, some)
    assert torch.equal(view.keys, before)
    with pytest.raises(PlanError, match="recent"):
        LookM(0.5, recent=-0.5)
