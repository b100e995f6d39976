"""The contracts of the hold stage, over families, methods and evict stages."""

from __future__ import annotations

import copy

import pytest
import torch

from conduit_kv import VLM, PlanError, compress
from conduit_kv.cache import PackedSegment
from conduit_kv.engine.report import Report
from conduit_kv.stages.hold import average_bits
from tests.contracts.helpers import (
    EVICT,
    TOLERANCE,
    as_it_was,
    batch_and_singles,
    converse,
    error,
    held,
    plain_logits,
    plan_of,
    same_held,
    tokens,
    turn,
    with_cache,
)
from tests.contracts.test_bytes import reachable
from tests.tiny import FAMILY_NAMES, tiny_model

HOLD = (
    "windowquant:3.17",
    "windowquant(window=5)",
    "random-windows:2.5",
    "kivi:2(residual=3)",
    "kivi:3(residual=0)",
    "rtn:4",
    "rtn:8(of=prompt)",
    "fp8",
)
"""Plans of each method."""
CODES = 1e-3
"""Tolerance where keys and values come from sums in another order: a number that lies between two
levels may get the other code."""
IDENTITY = ("windowquant:16", "random-windows:16", "kivi:16", "rtn:16")


def pairs():
    """Every family and every plan, each at least once."""
    count = max(len(FAMILY_NAMES), len(HOLD))
    return [(FAMILY_NAMES[n % len(FAMILY_NAMES)], HOLD[n % len(HOLD)]) for n in range(count)]


def packed(cache):
    return [s for layer in cache for s in layer.frozen if isinstance(s, PackedSegment)]


@pytest.mark.parametrize("plan", IDENTITY)
def test_sixteen_bits_are_the_plain_path(plan):
    name = FAMILY_NAMES[IDENTITY.index(plan)]
    model, _ = tiny_model(name)
    inputs = turn(name, 2)
    with as_it_was(model), compress(model, plan) as run:
        assert error(model(**inputs).logits, plain_logits(model, inputs)) < TOLERANCE
    assert not packed(run.cache) and run.report.visual_bits is None


@pytest.mark.parametrize(("family", "plan"), pairs())
def test_what_is_packed_is_what_is_attended(family, plan):
    """A cache that holds in full precision what the packed one reads answers the same."""
    model, _ = tiny_model(family)
    run = converse(model, plan, [turn(family, 2)])
    assert packed(run.cache)
    plain = converse(model, "full", [turn(family, 2)])
    for mine, its in zip(run.cache, plain.cache, strict=True):
        every = list(range(mine.kv_heads))
        index, keys, values = mine.read(0, every)
        assert torch.equal(index, its.held(0, 0))
        changed = (keys - its.tail.keys[0]).abs().max()
        if mine.frozen:
            assert changed > 0
        with torch.inference_mode():
            its.tail.keys[0], its.tail.values[0] = keys, values
    later = [tokens(70), tokens(71, 72, 73), tokens(74)]
    if "of=prompt" in plan:  # a turn of several tokens would be packed too
        later = [tokens(70), tokens(71)]
    found = converse(model, plan, later, cache=run.cache)
    expected = converse(model, "full", later, cache=plain.cache)
    assert error(found.logits, expected.logits) < TOLERANCE
    assert same_held(found.held, expected.held)


@pytest.mark.parametrize(("family", "plan"), pairs()[::2])
def test_a_batch_is_each_alone(family, plan):
    model, _ = tiny_model(family)
    batch, singles = batch_and_singles(family, (2, 0, 1))
    step = torch.tensor([[70], [71], [72]])
    with as_it_was(model), compress(model, plan) as run:
        model(**batch)
        together = run.cache
        found = model(input_ids=step, **with_cache(model, together)).logits
        assert len(packed(together)) > 0
        for row, inputs in enumerate(singles):
            model(**inputs)
            alone = run.cache
            logits = model(input_ids=step[row : row + 1], **with_cache(model, alone)).logits
            assert error(found[row : row + 1], logits) < CODES
            assert same_held(held(together, row), held(alone))


@pytest.mark.parametrize("plan", HOLD[::2])
def test_chunks_are_the_whole_prefill(plan):
    model, _ = tiny_model("qwen3-vl")
    parts = [turn("qwen3-vl", 2), tokens(70)]
    whole, chunked = (converse(model, plan, parts, chunk=chunk) for chunk in (None, 5))
    assert error(chunked.logits, whole.logits) < CODES


@pytest.mark.parametrize("plan", ["windowquant:3.17(tolerance=0.01)", "kivi:4(residual=0)"])
def test_beams_and_copies(plan):
    model, _ = tiny_model("llava")
    inputs, _ = batch_and_singles("llava", (1, 2))
    with as_it_was(model), compress(model, plan) as run:
        one = model.generate(**inputs, num_beams=3, max_new_tokens=4, do_sample=False)
        assert one.shape[0] == 2
        report = Report.of(run.cache)
        assert report.kv_allocated_bytes == reachable(run.cache)
        model(**inputs)
        cache = run.cache
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        step = model(input_ids=torch.tensor([[70]] * 4), **with_cache(model, cache)).logits
        model(**{name: value for name, value in inputs.items()})
        plain = model(input_ids=torch.tensor([[70]] * 2), **with_cache(model, run.cache)).logits
    assert error(step[::2], plain.flip(0)) < TOLERANCE
    assert error(step[1::2], plain.flip(0)) < TOLERANCE


@pytest.mark.parametrize("evict", EVICT)
def test_every_evict_method_holds_packed_what_it_keeps(evict):
    """Evict, hold, decode, and a later turn that evicts from what is packed."""
    number = EVICT.index(evict)
    family, plan = FAMILY_NAMES[number % len(FAMILY_NAMES)], HOLD[number % len(HOLD)]
    model, _ = tiny_model(family)
    both = f"{plan_of(evict, 0.5)} + {plan}"
    first, later = turn(family, 2), turn(family, 1, first=False)
    alone = converse(model, plan_of(evict, 0.5), [first])
    run = converse(model, both, [first])
    assert same_held(run.held, alone.held)  # what is kept is decided before it is packed
    check_bytes(run.cache)
    before = copy.deepcopy(
        [{h: layer.held(0, h) for h in range(layer.kv_heads)} for layer in run.cache]
    )
    more = converse(model, both, [tokens(70), later, tokens(71)], cache=run.cache)
    assert bool(torch.isfinite(more.logits).all())
    check_bytes(more.cache)
    if evict != "full":
        gone = [
            len(before[n][h]) - int(torch.isin(before[n][h], layer.held(0, h)).sum())
            for n, layer in enumerate(more.cache)
            for h in range(layer.kv_heads)
            if layer.kind == "full"
        ]
        assert sum(gone) > 0


@pytest.mark.parametrize(
    ("family", "route", "plan"),
    [
        ("llava", "fastv:0.7", "windowquant:3.17"),
        ("qwen3-vl", "reroute:0.6", "kivi:4(residual=0)"),
        ("qwen2.5-vl", "fastv:0.7(scores_from=previous)", "rtn:4"),
    ],
)
def test_what_a_route_leaves_is_held_packed(family, route, plan):
    """Layers that hold different tokens, each packed; what runs where is decided as without."""
    model, _ = tiny_model(family)
    first, later = turn(family, 2), turn(family, 1, first=False)
    alone = converse(model, route, [first])
    run = converse(model, f"{route} + {plan}", [first])
    assert same_held(run.held, alone.held) and packed(run.cache)
    assert len({len(layer[0]) for layer in run.held}) > 1
    check_bytes(run.cache)
    more = converse(model, f"{route} + {plan}", [tokens(70), later, tokens(71)], cache=run.cache)
    assert bool(torch.isfinite(more.logits[-1]).all())  # rows that the route deletes are NaN
    check_bytes(more.cache)


def check_bytes(cache):
    report = Report.of(cache)
    assert report.kv_allocated_bytes == reachable(cache) == sum(report.bytes_by_kind.values())
    assert report.kv_bytes <= sum(
        report.bytes_by_kind.get(kind, 0) for kind in ("keys", "values", "scales")
    )


@pytest.mark.parametrize("plan", HOLD)
def test_average_bits_are_those_packed(plan):
    model, _ = tiny_model("llava")
    cache = converse(model, plan, [turn("llava", 2)]).cache
    payload = live = 0.0
    for layer in cache:
        for segment in packed([layer]):
            for part in segment.rows[0]:
                words = [t for kind, t in part.store.tensors() if kind in ("keys", "values")]
                slots = part.store.dense(torch.float32)[0].shape[1]
                bits = sum(t.numel() * t.element_size() * 8 for t in words)
                payload += bits * len(part.index) / slots
                live += len(part.index) * part.heads * 2 * 16
    visual = sum(int(cache.progress.layouts[0].visual.sum()) for _ in cache) * 2 * 2 * 16
    if "prompt" not in plan and "kivi:3" not in plan:  # three bits of 16 channels fill no word
        assert average_bits(cache) == pytest.approx((payload + 16 * (visual - live)) / visual)
    assert Report.of(cache).visual_bits == average_bits(cache)


def test_requests_decoded_together_and_forked():
    vlm = VLM(*tiny_model("qwen2.5-vl"))
    plans = ["windowquant:3.17", "kivi:2(residual=2)", "full", "tova:0.5 + rtn:4"]
    inputs = [turn("qwen2.5-vl", 1 + n % 2, " Why" * (n + 1) + "?") for n in range(4)]
    alone = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    together = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    expected = [vlm.decode_together([state], 4)[0] for state in alone]
    assert vlm.decode_together(together, 4) == expected
    from conduit_kv.plan import Plan

    watched = [Plan.of(plan) for plan in plans]
    state = vlm.prefill(inputs[1], "full", watch=watched)
    forks = vlm.forks(state, watched)
    for fork, plan in zip(forks, plans, strict=True):
        own = vlm.prefill(inputs[1], plan)
        assert same_held(held(fork.cache), held(own.cache))
        assert fork.report.visual_bits == own.report.visual_bits
        assert vlm.decode_together([fork], 3) == vlm.decode_together([own], 3)
    again = vlm.prefill(inputs[0], "windowquant:2.5")
    other = again.cache.fork()
    vlm.step([again], [70])
    assert other.get_seq_length() == again.cache.get_seq_length() - 1
    assert packed(other)[0] is packed(again.cache)[0]


def test_a_failed_step_leaves_the_cache_as_it_was(monkeypatch):
    model, _ = tiny_model("llava")
    run = converse(model, "windowquant:3(research=true)", [turn("llava", 1)])
    before = held(run.cache)
    layer = model.model.language_model.layers[2]

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(layer, "forward", fail)
        converse(model, "windowquant:3(research=true)", [turn("llava", 1, first=False)],
                 cache=run.cache)  # fmt: skip
    assert same_held(held(run.cache), before)
    found = converse(model, "windowquant:3(research=true)", [tokens(70)], cache=run.cache)
    fresh = converse(model, "windowquant:3(research=true)", [turn("llava", 1), tokens(70)])
    assert error(found.logits, fresh.logits[-1:]) < TOLERANCE


def test_cropping_text_works_and_packed_tokens_do_not_come_back():
    model, _ = tiny_model("llava")
    run = converse(model, "kivi:4(residual=0)", [turn("llava", 1), tokens(70), tokens(71)])
    run.cache.crop(-2)
    found = converse(model, "kivi:4(residual=0)", [tokens(70)], cache=run.cache)
    fresh = converse(model, "kivi:4(residual=0)", [turn("llava", 1), tokens(70)])
    assert error(found.logits, fresh.logits[-1:]) < TOLERANCE
    with pytest.raises(PlanError, match="take back"):
        run.cache.crop(-(run.cache.get_seq_length() - 2))


def test_a_layer_is_packed_as_soon_as_it_has_run():
    """Without an evict stage the whole cache is never there in full precision."""
    model, _ = tiny_model("llava")
    seen = []
    with as_it_was(model), compress(model, "kivi:2(residual=0)") as run:
        hook = model.model.language_model.layers[2].register_forward_pre_hook(
            lambda *_: seen.append([len(packed([layer])) for layer in run_cache()]),
        )
        caches = []
        run_cache = lambda: caches[0]  # noqa: E731
        new = run.new_cache

        def remembered():
            caches.append(new())
            return caches[-1]

        run.new_cache = remembered
        try:
            model(**turn("llava", 2))
        finally:
            hook.remove()
    assert seen == [[1, 1, 0, 0]]


def test_sliding_layers_are_left_alone():
    model, _ = tiny_model("qwen2.5-vl-sliding")
    cache = converse(model, "rtn:4", [turn("qwen2.5-vl-sliding", 2)]).cache
    assert [bool(packed([layer])) for layer in cache] == [layer.kind == "full" for layer in cache]
