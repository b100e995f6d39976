"""Contract 2: batch or single, chunked or whole, one step or three, together or alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv import compress
from conduit_kv.engine.report import Report
from tests.contracts.helpers import (
    EVICT,
    TOLERANCE,
    as_it_was,
    batch_and_singles,
    converse,
    error,
    examples,
    held,
    plan_of,
    same_held,
    sampled,
    tokens,
    turn,
    with_cache,
)
from tests.contracts.test_reference import conversation
from tests.tiny import FAMILY_NAMES, NAMES, tiny_model

ANSWER = (70, 71, 72)


def together(model, plan, inputs, chunk=None):
    """A batch's prefill and answer: logits of the last column of each step, and the cache."""
    with as_it_was(model), compress(model, plan, prefill_chunk=chunk) as run:
        logits = [model(**inputs).logits[:, -1]]
        for token in ANSWER:
            ids = torch.full((len(inputs["input_ids"]), 1), token)
            logits.append(model(input_ids=ids, **with_cache(model, run.cache)).logits[:, -1])
        return torch.stack(logits, 1), run.cache


def check_batch(name, plan, images=(2, 0, 1), chunk=None):
    model, _ = tiny_model(name)
    batch, singles = batch_and_singles(name, images)
    logits, cache = together(model, plan, batch, chunk)
    for row, inputs in enumerate(singles):
        alone, its = together(model, plan, inputs)
        assert same_held(held(cache, row), held(its))
        assert error(logits[row : row + 1], alone) < TOLERANCE
        report, single = Report.of(cache).sequences[row], Report.of(its).sequences[0]
        assert report.images == single.images and report.kept == single.kept
        assert [x.images for x in report.layers] == [x.images for x in single.layers]
        assert torch.equal(cache.progress.position_ids(row), its.progress.position_ids(0))


@pytest.mark.parametrize("method", EVICT)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_batch_equals_its_sequences_one_by_one(family, method):
    check_batch(family, plan_of(method, 0.4))


@pytest.mark.parametrize("options", [("of=visual",), ("per=image",), ("cover=0.5",)])
@pytest.mark.parametrize("method", EVICT)
def test_a_batch_under_the_common_options(method, options):
    if method in ("full", "uniform"):
        pytest.skip("has no such option")
    family = FAMILY_NAMES[EVICT.index(method) % len(FAMILY_NAMES)]
    check_batch(family, plan_of(method, 0.5, *options))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FAMILY_NAMES])
def test_a_batch_on_the_variants_of_families(name):
    check_batch(name, "tgv-kv:0.4")
    check_batch(name, "h2o:0.4(heads=all)")


@pytest.mark.parametrize(("family", "method"), sampled(2))
def test_a_conversation_in_a_batch_equals_its_sequences_one_by_one(family, method):
    """Turns of different lengths are padded on the left, each by itself."""
    model, _ = tiny_model(family)
    plan = plan_of(method, 0.4)
    first, firsts = batch_and_singles(family, (1, 0, 2))
    second, seconds = batch_and_singles(family, (0, 2, 1))
    answer = [torch.tensor([[70 + row] for row in range(3)]) + 3 * n for n in range(2)]

    def steps(turns, rows):
        ids = [{"input_ids": token[rows]} for token in answer]
        return [turns[0], *ids, turns[1], *ids]

    logits = []
    with as_it_was(model), compress(model, plan) as run:
        cache = run.new_cache()
        for step in steps((first, second), [0, 1, 2]):
            logits.append(model(**step, **with_cache(model, cache)).logits[:, -1])
    for row, turns in enumerate(zip(firsts, seconds, strict=True)):
        alone = converse(model, plan, steps(turns, [row]))
        assert same_held(held(cache, row), alone.held)
        last = [step.stop - 1 for step in alone.steps]
        assert error(torch.stack([each[row] for each in logits]), alone.logits[last]) < TOLERANCE
        ours, theirs = cache.progress.position_ids(row), alone.cache.progress.position_ids(0)
        assert torch.equal(ours, theirs)


@examples(12)
@given(
    family=st.sampled_from(FAMILY_NAMES),
    method=st.sampled_from(EVICT),
    images=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    budget=st.sampled_from([0.05, 0.3, 0.9, 7, "20KB"]),
    chunk=st.sampled_from([None, 5, 16]),
)
def test_any_batch_equals_its_sequences_one_by_one(family, method, images, budget, chunk):
    check_batch(family, plan_of(method, budget), images, chunk)


@pytest.mark.parametrize("method", EVICT)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_chunked_prefill_is_the_whole_one(family, method):
    """Deepstack (Qwen3-VL) included: images are cut by the chunks."""
    model, _ = tiny_model(family)
    parts = conversation(family)
    whole = converse(model, plan_of(method, 0.4), parts)
    chunk = 5 + EVICT.index(method)
    chunked = converse(model, plan_of(method, 0.4), parts, chunk=chunk)
    assert same_held(whole.held, chunked.held)
    assert error(chunked.logits, whole.logits) < TOLERANCE


@examples(9)
@given(family=st.sampled_from(FAMILY_NAMES), chunk=st.integers(1, 60))
def test_any_chunk_is_the_whole_prefill(family, chunk):
    model, _ = tiny_model(family)
    parts = [turn(family, 2), tokens(70)]
    whole = converse(model, "tgv-kv:0.4", parts)
    chunked = converse(model, "tgv-kv:0.4", parts, chunk=chunk)
    assert same_held(whole.held, chunked.held)
    assert error(chunked.logits, whole.logits) < TOLERANCE


@pytest.mark.parametrize("family", NAMES)
def test_three_tokens_at_once_are_three_single_ones(family):
    model, _ = tiny_model(family)
    first = turn(family, 1)
    at_once = converse(model, "full", [first, tokens(70, 71, 72), tokens(73)])
    one_by_one = converse(model, "full", [first, *(tokens(t) for t in (70, 71, 72, 73))])
    assert error(at_once.logits, one_by_one.logits) < TOLERANCE
    assert same_held(at_once.held, one_by_one.held)
    ours, theirs = (run.cache.progress.position_ids(0) for run in (at_once, one_by_one))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("family", "method"), sampled(1))
def test_a_turn_word_by_word_is_the_turn_at_once_where_nothing_is_evicted(family, method):
    """With the identity setting; any other re-solves its budget at the end of a turn."""
    model, _ = tiny_model(family)
    plan = plan_of(method, 1.0)
    first, second = turn(family, 1), turn(family, 0, first=False)
    words = [tokens(int(token)) for token in second["input_ids"][0]]
    at_once = converse(model, plan, [first, second])
    one_by_one = converse(model, plan, [first, *words])
    assert error(at_once.logits, one_by_one.logits) < TOLERANCE
