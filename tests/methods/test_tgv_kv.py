"""TGV-KV against its formula, written out in loops over the full attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.errors import PlanError
from conduit_kv.methods.evict import PROTECTED, Scores, TgvKv
from conduit_kv.methods.evict import parts as parts_module
from tests.methods.views import any_view, best, decode, dense, kept_by, make_view, step_views


def reference(view, rows="text", text_score="text"):
    """Scores, tiers and layer weight from the formula."""
    attention = dense(view).mean(0)
    text = view.layout.text.tolist()
    size = view.size
    first = next((j for j in range(size) if not text[j]), size)
    mine = view.rows.tolist()
    if rows == "last":
        ground = [size - 1]
    elif rows == "text":
        ground = [i for i in mine if text[i] and i > first] or [size - 1]
    else:
        ground = [i for i in mine if i >= first] or [size - 1]
    weight = {}
    for j in ground:
        below = [i for i in ground if i >= j]
        weight[j] = sum(float(attention[i, j]) for i in below) / len(below)
    whole = sum(weight.values())
    text_rows = mine if text_score == "all" else [i for i in mine if text[i]] or ground
    score = []
    for j in range(size):
        if text[j]:
            score.append(sum(float(attention[i, j]) for i in text_rows))
        else:
            score.append(sum(weight[i] / whole * float(attention[i, j]) for i in ground))
    tier = [1 if is_text else 0 for is_text in text]
    for j in range(size):
        if int(view.index[j]) < 4 or j == size - 1:
            tier[j] = PROTECTED
    grounded = sum(float(attention[i, j]) for i in ground for j in range(size) if not text[j])
    return score, tier, grounded


@pytest.mark.parametrize("text_score", ["text", "all"])
@pytest.mark.parametrize("rows", ["text", "last", "all"])
@given(view=any_view())
def test_scores_are_the_formula(view, rows, text_score):
    scores = TgvKv(rows=rows, text_score=text_score).score(view)
    score, tier, weight = reference(view, rows, text_score)
    torch.testing.assert_close(
        scores.token.double(), torch.tensor(score).double(), atol=1e-5, rtol=0
    )
    assert scores.tier.tolist() == tier
    assert scores.weight == pytest.approx(weight, abs=1e-4)


@given(any_view(), st.integers(1, 40))
def test_text_is_kept_before_images(view, budget):
    (kept,) = kept_by(TgvKv(), view, budget)
    score, tier, _ = reference(view)
    always = [j for j in range(view.size) if tier[j] == PROTECTED]
    text = [j for j in range(view.size) if tier[j] == 1]
    visual = [j for j in range(view.size) if tier[j] == 0]
    rest = budget - len(always)
    expected = always + best(score, text, rest) + best(score, visual, rest - len(text))
    assert kept == sorted(expected)


def published(views, keep, rows_of_text):
    """The authors' rule, one image: kept tokens per layer, from full attentions.

    ``rows_of_text`` is where the text after the image begins.
    """
    layers, size = len(views), views[0].size
    image = torch.nonzero(views[0].layout.visual).flatten()
    start = int(image[0])
    maps = [dense(view).mean(0) for view in views]
    ranks, sums = [], []
    for attention in maps:
        among = attention[rows_of_text:, rows_of_text:]
        count = torch.arange(len(among), 0, -1)
        importance = among.sum(0) / count
        to_image = attention[rows_of_text:, start:rows_of_text]
        column = attention.sum(0) + 100  # text stands above any visual token
        column[start:rows_of_text] = (to_image * importance[:, None]).sum(0)
        ranks.append(column)
        sums.append(float(to_image.sum()))
    ratio = [(size - layers * size * keep * s / sum(sums)) / size for s in sums]
    forget = [max(int(np.round(r * size)), 0) for r in ratio]
    kept = []
    for column, drop in zip(ranks, forget, strict=True):
        middle = torch.argsort(column[4 : size - 1])[drop:] + 4
        kept.append(sorted([0, 1, 2, 3, *middle.tolist(), size - 1]))
    return kept


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("keep", [0.7, 0.4, 0.25, 0.1])
def test_one_image_is_the_published_rule(seed, keep):
    views = [make_view([5, (4, 6), 9], layer=layer, seed=seed, sharp=3.0) for layer in range(4)]
    method = TgvKv(redistribute=False, text_score="all")
    scores = [[method.score(view)] for view in views]
    size = views[0].size
    budgets = method.layer_budgets(round(keep * 4 * size), scores, [size] * 4)
    kept = [
        method.select([(view, group[0])], budget)[0][0].tolist()
        for view, group, budget in zip(views, scores, budgets, strict=True)
    ]
    assert kept == published(views, round(keep * 4 * size) / (4 * size), 5 + 24)


def weights(*values):
    return [[Scores(torch.zeros(1), weight=value)] for value in values]


def test_layer_budgets_follow_the_attention_to_images():
    method = TgvKv()
    assert method.layer_budgets(60, weights(1.0, 2.0, 3.0), [100] * 3) == [10, 20, 30]
    # What a layer cannot hold goes to the others in proportion, and the sum stays.
    assert method.layer_budgets(60, weights(1.0, 1.0, 10.0), [100, 100, 30]) == [15, 15, 30]
    # Length plays no part.
    assert method.layer_budgets(40, weights(1.0, 1.0), [100, 50]) == [20, 20]


def test_public_budgets_are_clipped_and_not_shared_out():
    method = TgvKv(redistribute=False)
    assert method.layer_budgets(60, weights(1.0, 1.0, 10.0), [100, 100, 30]) == [5, 5, 30]
    assert method.layer_budgets(60, weights(1.0, 9.0), [100, 100]) == [6, 54]
    assert method.layer_budgets(60, weights(0.1, 9.9), [100, 100]) == [5, 59]
    assert method.layer_budgets(60, weights(0.0, 0.0), [100, 100]) == [30, 30]


def test_without_images_every_layer_keeps_as_much():
    views = [make_view([12], layer=layer) for layer in range(3)]
    method = TgvKv()
    scores = [[method.score(view)] for view in views]
    assert method.layer_budgets(24, scores, [12] * 3) == [8, 8, 8]
    for view, (score,) in zip(views, scores, strict=True):
        column = dense(view).mean(0).sum(0).tolist()
        expected = sorted([0, 1, 2, 3, 11, *best(column, range(4, 11), 3)])
        assert method.select([(view, score)], 8)[0][0].tolist() == expected


def test_blocks_do_not_change_the_scores(monkeypatch):
    view = make_view([3, (4, 4), 8, (2, 3), 5])
    whole = TgvKv(rows="all", text_score="all").score(view)
    monkeypatch.setattr("conduit_kv.view._BLOCK_FLOATS", 4 * view.size * 3)
    monkeypatch.setattr(parts_module, "_AT_ONCE", 0)
    blocked = TgvKv(rows="all", text_score="all").score(view)
    torch.testing.assert_close(whole.token, blocked.token)
    assert whole.weight == pytest.approx(blocked.weight)


PARTS = [5, (3, 4), 6]


def test_decode_holds_a_share_and_spares_the_prompt():
    trace = decode(TgvKv(0.8), step_views(PARTS, 10), make_view(PARTS), 10)
    prompt = {0, 1, 2, 3, *range(17, 23)}
    for step, (_, target, held) in enumerate(trace):
        assert prompt <= set(held.tolist())
        assert 23 + step in held.tolist()
        assert len(held) == target == math.ceil(18 * (24 + step) / 23)


def test_decode_drops_what_the_newest_query_attends_to_least():
    views = step_views(PARTS, 3)
    method, start = TgvKv(0.7), make_view(PARTS)
    trace = decode(method, views, start, 3)
    held = None
    for _, _, after in trace:
        if held is not None:
            now = torch.cat([held, torch.tensor([int(after[-1])])])
            view = views(now, torch.zeros(1, len(now)))
            attention = dense(view).mean(0)[-1]
            spared = [j for j in now.tolist() if j < 4 or 17 <= j < 23 or j == now[-1]]
            free = [i for i, j in enumerate(now.tolist()) if j not in spared]
            gone = best((-attention).tolist(), free, len(now) - len(after))
            assert sorted(set(range(len(now))) - set(gone)) == [
                now.tolist().index(j) for j in after.tolist()
            ]
        held = after


def test_every_lets_tokens_go_together():
    """Up to ``every`` beyond the share, then back to it: those the newest query needs least."""
    views, every = step_views(PARTS, 12), 3
    trace = decode(TgvKv(0.7, every=every), views, make_view(PARTS), 12)
    held, went = None, []
    for before, target, after in trace:
        went.append(before - len(after))
        assert len(after) == (target if before - target >= every else before)
        if held is not None and went[-1]:
            now = torch.cat([held, after[-1:]])
            attention = dense(views(now, torch.zeros(1, len(now)))).mean(0)[-1]
            spared = [i for i, j in enumerate(now.tolist()) if j < 4 or 17 <= j < 23]
            free = [i for i in range(len(now) - 1) if i not in spared]
            gone = best((-attention).tolist(), free, went[-1])
            assert [j for i, j in enumerate(now.tolist()) if i not in gone] == after.tolist()
        held = after
    assert set(went) == {0, every}


def test_every_is_checked():
    with pytest.raises(PlanError, match="every=0"):
        TgvKv(0.5, every=0)
    with pytest.raises(PlanError, match="decode=public does not"):
        TgvKv(0.5, every=2, decode="public")


def test_decode_grows_when_only_protected_tokens_are_left():
    parts = [4, (1, 2), 8]
    trace = decode(TgvKv(0.3), step_views(parts, 6), make_view(parts), 6)
    # Sinks and last token are kept by the floor; text after the image is cut to that.
    assert len(trace[0][2]) <= 6
    prompt = set(range(6, 14)) & set(trace[0][2].tolist())
    assert all(prompt <= set(held.tolist()) for _, _, held in trace)


def test_public_decode_slides_a_suffix_and_drops_one_token():
    """The authors' rule: the last n tokens are spared, n the prompt text kept at first."""
    steps, views = 12, step_views(PARTS, 12)
    method, start = TgvKv(0.5, decode="public"), make_view(PARTS)
    trace = decode(method, views, start, steps)
    scores = method.score(start)
    ((kept,),) = method.select([(start, scores)], _granted(method, start))
    suffix = int((kept >= 17).sum())
    held = kept
    for step, (before, target, after) in enumerate(trace):
        now = torch.cat([held, torch.tensor([23 + step])])
        assert before == len(now)
        attention = dense(views(now, torch.zeros(1, len(now)))).mean(0)[-1]
        free = [i for i, j in enumerate(now.tolist()) if j >= 4 and i < len(now) - suffix]
        gone = best((-attention).tolist(), free, min(before - target, 1))
        expected = [j for i, j in enumerate(now.tolist()) if i not in gone]
        assert after.tolist() == expected
        held = after
    # The suffix has slid past the prompt's text, so some of that is gone.
    assert not set(range(17, 23)) <= set(held.tolist())


def _granted(method, start):
    total = method.budget.total([start.size], 1.0)
    return method.layer_budgets(total, [[method.score(start)]], [start.size])[0]


def test_decode_off_and_visual_budgets_evict_nothing():
    assert not TgvKv(0.5, decode="off").scores_steps
    assert not TgvKv(0.5, of="visual").scores_steps
    assert TgvKv(0.5).step_drops(3) == 3
    assert TgvKv(0.5, decode="public").step_drops(3) == 1
    assert TgvKv(0.5, decode="public").step_drops(0) == 0


def test_a_later_turn_spares_the_text_of_both_turns():
    parts = [5, (2, 3), 4, 3, 5]  # image, question, answer, second question
    carried = torch.zeros(2, 23)
    carried[:, 11:15] = 1
    view = make_view(parts, rows=5, carried=carried)
    carry = TgvKv(0.5).score(view).carry
    assert carry.shape == (1, 23)
    assert torch.nonzero(carry[0]).flatten().tolist() == [11, 12, 13, 14, 18, 19, 20, 21, 22]
