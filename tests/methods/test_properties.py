"""What holds for every evict method."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.budget import Budget
from conduit_kv.errors import PlanError
from conduit_kv.methods import registry
from conduit_kv.methods.catalogue import NAMES
from conduit_kv.methods.evict import (
    FLOOR,
    H2O,
    PROTECTED,
    AdaKv,
    AirCache,
    KNorm,
    LookM,
    PrefixKv,
    PyramidKv,
    Random,
    SnapKv,
    StreamingLlm,
    TextRandom,
    TgvKv,
    Tova,
    Uniform,
    VlCache,
)
from tests.methods.views import (
    any_view,
    clear,
    decode,
    make_view,
    prompts,
    same_view,
    step_views,
)

METHODS = [
    AdaKv(0.3, window=2),
    AirCache(0.3),
    H2O(0.3),
    H2O(0.3, heads="all"),
    KNorm(0.3),
    LookM(0.3),
    PrefixKv(0.3),
    PyramidKv(0.3, window=2, beta=3),
    PyramidKv(0.3, window=1, schedule="kvpress"),
    Random(0.3),
    SnapKv(0.3, window=3),
    StreamingLlm(0.3),
    TextRandom(0.3),
    TgvKv(0.3),
    TgvKv(0.3, redistribute=False),
    TgvKv(0.3, rows="all", text_score="all"),
    TgvKv(0.3, rows="last"),
    Tova(0.3),
    Uniform(0.3),
    VlCache(0.3),
]
each = pytest.mark.parametrize("method", METHODS, ids=str)


def test_every_method_is_here():
    evict = {name for name, method in registry().items() if method.stage == "evict"}
    assert evict == set(NAMES["evict"]) == {method.name for method in METHODS} | {"full"}
    for method in METHODS:
        assert type(method).__doc__ and type(method).__dataclass_params__.frozen
        assert "decoding" in type(method).__doc__ and method.in_decode
        control = method.name in ("random", "text-random", "uniform")
        assert control or method.paper.startswith("https://arxiv.org/abs/")
        # The docstring says whether the details are known or our own.
        assert ("reconstructed" in type(method).__doc__) == (method.basis == "reconstructed")


@each
@given(
    view=any_view(),
    budget=st.integers(0, 45),
    of=st.sampled_from(["prompt", "visual"]),
    per=st.sampled_from(["sequence", "image"]),
    cover=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_what_is_kept(method, view, budget, of, per, cover):
    if method.name == "uniform":
        cover = 0.0
    method = method.replace(of=of, per=per, cover=cover)
    scores = method.score(view)
    assert scores.token.shape in ((view.size,), (view.kv_heads, view.size))
    assert scores.token.dtype == torch.float32 and scores.token.isfinite().all()
    assert scores.token.device.type == "cpu"
    assert scores.tier is None or (scores.tier.dtype, scores.tier.shape) == (
        torch.int8,
        (view.size,),
    )
    alike, apart = (1, view.size), (view.kv_heads, view.size)
    assert scores.carry is None or scores.carry.shape in (alike, apart)
    counted = int(view.layout.visual.sum()) if of == "visual" else view.size
    budget = min(budget, counted)
    (heads,) = method.select([(view, scores)], budget)
    assert len(heads) in (1, view.kv_heads)
    besides = int(view.layout.text.sum()) if of == "visual" else 0
    always = torch.zeros(view.size, dtype=torch.bool)
    if scores.tier is not None:
        always |= scores.tier == PROTECTED
    if of == "visual":
        always |= view.layout.text
    for kept in heads:
        assert kept.dtype == torch.long
        assert kept.tolist() == sorted(set(kept.tolist()))
        assert not len(kept) or (int(kept[0]) >= 0 and int(kept[-1]) < view.size)
        assert set(torch.nonzero(always).flatten().tolist()) <= set(kept.tolist())
        if not method.per_head:
            assert len(kept) == max(budget + besides, int(always.sum()))
    if method.per_head:
        assert sum(map(len, heads)) == max(budget + besides, int(always.sum())) * view.kv_heads


@each
@given(
    parts=prompts(),
    share=st.floats(0.02, 1.0),
    seed=st.integers(0, 50),
    of=st.sampled_from(["prompt", "visual"]),
    later=st.booleans(),
)
def test_layer_budgets_are_exact_or_the_floor_wins(method, parts, share, seed, of, later):
    method = method.replace(budget=share, of=of)
    views = []
    for layer in range(3):
        view = make_view(parts, layer=layer, seed=seed, sharp=1.0 + 2 * layer)
        if later and view.size > 2:
            # Layers hold different tokens of the earlier turn.
            held = list(range(0, view.size - 2, layer + 1))
            view = make_view(parts, layer=layer, seed=seed, rows=2, held=held)
        views.append(view)
    scores = [[method.score(view)] for view in views]
    most = [int(v.layout.visual.sum()) if of == "visual" else v.size for v in views]
    seen = int(make_view(parts).layout.visual.sum()) if of == "visual" else make_view(parts).size
    total = method.budget.total([seen] * 3, 1.0)
    budgets = method.layer_budgets(total, scores, most)
    floors = [0 if of == "visual" else min(FLOOR, length) for length in most]
    assert all(isinstance(b, int) for b in budgets)
    assert all(f <= b <= m for f, b, m in zip(floors, budgets, most, strict=True))
    if getattr(method, "redistribute", True):
        assert sum(budgets) == min(max(total, sum(floors)), sum(most))
    for (score,), view, budget in zip(scores, views, budgets, strict=True):
        method.select([(view, score)], budget)


@each
@given(view=any_view())
def test_everything_is_kept_at_the_identity(method, view):
    method = method.replace(budget=1.0)
    assert method.is_identity and not method.replace(budget=0.5).is_identity
    assert method.budget == Budget(1.0)
    scores = method.score(view)
    (budget,) = method.layer_budgets(method.budget.total([view.size], 1.0), [[scores]], [view.size])
    (heads,) = method.select([(view, scores)], budget)
    assert all(kept.tolist() == list(range(view.size)) for kept in heads)
    assert method.merge(view, heads) is None


@each
@given(view=any_view(), budget=st.integers(0, 40))
def test_cover_zero_is_no_cover_and_cover_one_ignores_the_score(method, view, budget):
    scores = method.score(view)
    plain = method.select([(same_view(view, cover_rank=None), scores)], budget)
    again = method.select([(view, scores)], budget)
    for old, new in zip(plain[0], again[0], strict=True):
        assert torch.equal(old, new)
    if method.name == "uniform":
        with pytest.raises(PlanError):
            method.replace(cover=1.0)
        return
    rank = view.cover_rank("grid")
    (heads,) = method.replace(cover=1.0).select([(view, scores)], budget)
    tier, _ = method._counted(view, scores, budget)
    contested = view.layout.visual & (tier <= 0)
    for kept in heads:
        mine = kept[contested[kept]]
        order = torch.nonzero(contested).flatten()
        order = order[torch.sort(rank[order]).indices]
        assert sorted(mine.tolist()) == sorted(order[: len(mine)].tolist())


@each
def test_images_share_what_is_kept_of_them(method):
    view = make_view([5, (4, 5), 2, (2, 5), 3, (2, 5), 8], sharp=4.0)
    plain = method.replace(per="sequence", of="visual")
    shared = method.replace(per="image", of="visual")
    scores = method.score(view)
    for kept in shared.select([(view, scores)], 12)[0]:
        counts = view.layout.counts(kept)
        # Ada-KV's heads keep different numbers; 20, 10 and 10 tokens share each in proportion.
        exact = [sum(counts) * part for part in (0.5, 0.25, 0.25)]
        assert all(abs(c - e) < 1 for c, e in zip(counts, exact, strict=True))
    if method.name != "uniform":
        uneven = plain.select([(view, scores)], 12)[0]
        assert any(
            abs(c - 12 * part) >= 1
            for kept in uneven
            for c, part in zip(view.layout.counts(kept), (0.5, 0.25, 0.25), strict=True)
        )


@each
@given(view=any_view())
def test_order_of_heads_in_a_group_does_not_matter(method, view):
    group = view.heads // view.kv_heads
    shuffled = view.step_queries.unflatten(0, (view.kv_heads, group)).flip(1).flatten(0, 1)
    other = same_view(view, step_queries=shuffled)
    first, second = method.score(view), method.score(other)
    torch.testing.assert_close(first.token, second.token, atol=1e-5, rtol=1e-5)
    assert (first.weight or 0) == pytest.approx(second.weight or 0, abs=1e-4)
    if clear(first.token):
        for old, new in zip(
            method.select([(view, first)], 6)[0],
            method.select([(other, second)], 6)[0],
            strict=True,
        ):
            assert torch.equal(old, new)


@each
@given(view=any_view())
def test_scores_depend_on_nothing_else(method, view):
    """Scored twice the same; a view is not changed by being scored."""
    copy = same_view(
        view,
        keys=view.keys.clone(),
        values=view.values.clone(),
        step_queries=view.step_queries.clone(),
    )
    first, second = method.score(view), method.score(view)
    assert torch.equal(first.token, second.token)
    for name in ("keys", "values", "step_queries"):
        assert torch.equal(getattr(copy, name), getattr(view, name))


IN_DECODING = {
    "h2o": H2O(0.5, heads="all"),
    "streaming-llm": StreamingLlm(0.5),
    "tgv-kv": TgvKv(0.5),
    "tova": Tova(0.5),
}


@each
def test_what_happens_in_decoding_is_what_the_method_says(method):
    evicts = method.name in IN_DECODING
    assert (method.in_decode == "nothing more is evicted") == (not evicts)
    assert method.scores_steps == evicts


@pytest.mark.parametrize("method", IN_DECODING.values(), ids=str)
@pytest.mark.parametrize("budget", [0.5, 0.9, 14])
def test_decoding_holds_the_share(method, budget):
    """Text before the image and answers long enough that every method finds something to drop."""
    parts = [8, (3, 4), 3]
    options = {"kv_heads": 1, "heads": 2}
    method = method.replace(budget=budget)
    trace = decode(method, step_views(parts, 12, **options), make_view(parts, **options), 12)
    for step, (before, target, held) in enumerate(trace):
        assert before >= target
        assert len(held) == target
        assert int(held[-1]) == 23 + step
        assert target == (14 if budget == 14 else target) and target <= 24 + step


@each
def test_half_precision(method):
    view = make_view([4, (3, 4), 6])
    scores = method.score(
        same_view(
            view,
            keys=view.keys.bfloat16(),
            values=view.values.bfloat16(),
            step_queries=view.step_queries.bfloat16(),
        )
    )
    assert scores.token.dtype == torch.float32 and scores.token.isfinite().all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"of": "images"},
        {"per": "row"},
        {"cover": 1.5},
        {"cover": float("nan")},
        {"cover_by": "colour"},
        {"budget": 0.0},
        {"budget": 1.5},
        {"budget": -3},
    ],
)
def test_common_options_are_checked(wrong):
    with pytest.raises(PlanError):
        Tova(**({"budget": 0.5} | wrong))
