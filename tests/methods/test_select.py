"""From scores to kept tokens, against a plain-Python version."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit_kv.budget import largest_remainder
from conduit_kv.methods.evict import PROTECTED
from conduit_kv.methods.evict.select import at_least, keep_best, ranking, weakest
from tests.methods.views import make_layout, prompts, rich_prompts


@st.composite
def choices(draw):
    layout = make_layout(draw(prompts() if draw(st.booleans()) else rich_prompts()))
    size = len(layout)
    # Few values, so that ties are common.
    score = draw(st.lists(st.integers(-2, 2), min_size=size, max_size=size))
    tier = draw(st.lists(st.sampled_from([0, 0, 0, 1, PROTECTED]), min_size=size, max_size=size))
    rank = draw(st.permutations(range(size)))
    return {
        "score": torch.tensor(score).float(),
        "tier": torch.tensor(tier).to(torch.int8),
        "budget": draw(st.integers(0, size + 2)),
        "layout": layout,
        "by_image": draw(st.booleans()),
        "cover": draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        "cover_rank": torch.tensor(rank),
    }


def slow_keep(score, tier, budget, layout, by_image, cover, cover_rank):
    """The rules of a selection, one after the other."""
    score, tier, rank = score.tolist(), tier.tolist(), cover_rank.tolist()
    image = layout.image.tolist()
    order = sorted(range(len(score)), key=lambda j: (-tier[j], -score[j], j))
    kept = order[: max(budget, tier.count(PROTECTED))]
    contested = [j for j in order if image[j] >= 0 and tier[j] <= 0]
    number = len(set(kept) & set(contested))
    kept = [j for j in kept if j not in contested]
    pools = [(contested, number)]
    if by_image:
        pools = [([j for j in contested if image[j] == one], 0) for one in range(len(layout.grids))]
        shares = [len(pool) * number / max(len(contested), 1) for pool, _ in pools]
        counts = largest_remainder(shares, number)
        pools = [(pool, count) for (pool, _), count in zip(pools, counts, strict=True)]
    for pool, count in pools:
        covering = sorted(pool, key=rank.__getitem__)[: round(cover * count)]
        rest = [j for j in pool if j not in covering]
        kept += covering + rest[: count - len(covering)]
    return sorted(kept)


@settings(max_examples=300)
@given(choices(), st.integers(0, 3))
def test_the_weakest_are_the_last_of_the_ranking(choice, count):
    score, tier = choice["score"], choice["tier"]
    free = min(count, int((tier != PROTECTED).sum()))
    expected = ranking(score, tier).tolist()[len(score) - free :]
    assert weakest(score, tier, count).tolist() == expected


@settings(max_examples=300)
@given(choices())
def test_keep_best(choice):
    found = keep_best(**choice)
    assert found.dtype == torch.long
    assert found.tolist() == slow_keep(**choice)


@given(choices())
def test_counts_and_protection(choice):
    found = keep_best(**choice).tolist()
    protected = torch.nonzero(choice["tier"] == PROTECTED).flatten().tolist()
    assert set(protected) <= set(found)
    assert len(found) == min(len(choice["score"]), max(choice["budget"], len(protected)))
    assert found == sorted(set(found))


@given(choices())
def test_cover_zero_is_no_cover(choice):
    plain = keep_best(**(choice | {"cover": 0.0, "cover_rank": None}))
    assert torch.equal(keep_best(**(choice | {"cover": 0.0})), plain)


@given(choices(), st.randoms())
def test_cover_one_ignores_the_score_of_visual_tokens(choice, random):
    # Text above visual tokens: how many of these are kept is then settled.
    choice["cover"] = 1.0
    choice["tier"] = at_least(choice["tier"], choice["layout"].text, 1)
    free = (choice["layout"].visual & (choice["tier"] <= 0)).nonzero().flatten().tolist()
    other = choice["score"].clone()
    values = [random.random() for _ in free]
    other[free] = torch.tensor(values)
    assert torch.equal(keep_best(**choice), keep_best(**(choice | {"score": other})))


@given(choices())
def test_images_share_in_proportion(choice):
    choice |= {"by_image": True, "cover": 0.0}
    layout, tier = choice["layout"], choice["tier"]
    found = keep_best(**choice)
    free = layout.visual & (tier <= 0)
    sizes = [int((free & (layout.image == i)).sum()) for i in range(len(layout.grids))]
    counts = [int((free & (layout.image == i))[found].sum()) for i in range(len(layout.grids))]
    number, whole = sum(counts), max(sum(sizes), 1)
    assert all(
        math.floor(s * number / whole) <= c <= math.ceil(s * number / whole)
        for s, c in zip(sizes, counts, strict=True)
    )
    # And as many as without sharing.
    assert len(found) == len(keep_best(**(choice | {"by_image": False})))


def test_not_a_number_ranks_last():
    score = torch.tensor([float("nan"), -5.0, float("-inf"), 2.0])
    assert ranking(score, torch.zeros(4, dtype=torch.int8)).tolist() == [3, 1, 2, 0]


def test_at_least_raises_and_never_lowers():
    tier = torch.tensor([0, 1, 2, PROTECTED], dtype=torch.int8)
    assert at_least(tier, tier >= 0, 1).tolist() == [1, 1, 2, PROTECTED]
    assert at_least(tier, torch.tensor([0]), 2).tolist() == [2, 1, 2, PROTECTED]
    assert tier.tolist() == [0, 1, 2, PROTECTED]
