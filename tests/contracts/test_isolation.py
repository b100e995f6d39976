"""Contract 5: requests do not see each other, and no error leaves a trace on the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from conduit_kv import VLM, InputError, PlanError, Sampling, compress
from conduit_kv.cache.cache import borrowed
from conduit_kv.methods.evict.snapkv import SnapKv
from conduit_kv.plan import Plan
from conduit_kv.stages.evict import Eviction
from tests.contracts.helpers import (
    TOLERANCE,
    as_it_was,
    converse,
    error,
    fingerprint,
    held,
    plain_logits,
    same_held,
    tokens,
    turn,
    with_cache,
)
from tests.tiny import FAMILY_NAMES, tiny_model
from tests.tiny.parts import picture

PLANS = ("full", "tgv-kv:0.3", "h2o:0.4(heads=all)", "ada-kv:0.4(window=4)", "tova:0.3(cover=0.2)")


class Boom(Exception):
    """Raised on purpose."""


@contextmanager
def failing(module: torch.nn.Module, call: int, kind: type[BaseException]) -> Iterator[None]:
    """Let ``module`` raise at its ``call``-th call."""
    left = [call]

    def hook(*_):
        left[0] -= 1
        if not left[0]:
            raise kind("on purpose")

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


# -- interleaved ---------------------------------------------------------------------------------


def answer(vlm, plan, seed, asked=2):
    """A session's replies, asked one after the other."""
    session = vlm.session(plan)
    stream = script(session, seed, asked)
    return [reply for reply in stream if reply is not None], session


def script(session, seed, asked=2):
    """Two questions with images, piece by piece: yields None between pieces, then each reply."""
    for number in range(asked):
        stream = session.stream(
            f"What is this {seed}?",
            [picture(28, 42, seed + number)],
            max_new_tokens=4,
            sampling=Sampling(temperature=1.0, seed=seed),
        )
        while True:
            try:
                next(stream)
                yield None
            except StopIteration as end:
                yield end.value
                break


def same_reply(one, other):
    assert one.tokens == other.tokens and one.text == other.text and one.finish == other.finish
    assert one.report.sequences == other.report.sequences
    assert one.report.kv_bytes == other.report.kv_bytes


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_interleaved_sessions_answer_as_each_does_alone(family):
    model, processor = tiny_model(family)
    vlm = VLM(model, processor)
    chosen = [PLANS[(FAMILY_NAMES.index(family) + shift) % len(PLANS)] for shift in range(3)]
    alone = [answer(vlm, plan, seed) for seed, plan in enumerate(chosen)]
    sessions = [vlm.session(plan) for plan in chosen]
    scripts = [script(session, seed) for seed, session in enumerate(sessions)]
    replies: list[list] = [[] for _ in scripts]
    open_ones = set(range(len(scripts)))
    while open_ones:
        for number in sorted(open_ones):
            try:
                reply = next(scripts[number])
            except StopIteration:
                open_ones.remove(number)
                continue
            if reply is not None:
                replies[number].append(reply)
    for mine, session, (expected, single) in zip(replies, sessions, alone, strict=True):
        assert len(mine) == len(expected) == 2
        for one, other in zip(mine, expected, strict=True):
            same_reply(one, other)
        assert same_held(held(session.state.cache), held(single.state.cache))
        assert torch.equal(session.state.logits, single.state.logits)


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_positions_left_on_the_model_by_others_are_not_read(family):
    model, _ = tiny_model(family)
    inputs, expected = turn(family, 1), []
    stale = torch.tensor([[123]])
    with as_it_was(model):
        expected = model.generate(**inputs, max_new_tokens=4)
        model.model.rope_deltas = stale
        with compress(model, "snapkv:1.0"):
            ours = model.generate(**inputs, max_new_tokens=4)
        assert model.model.rope_deltas is stale
        run = converse(model, "full", [inputs, tokens(70), turn(family, 1, first=False)])
        assert model.model.rope_deltas is stale
        model.model.rope_deltas = None
        clean = converse(model, "full", [inputs, tokens(70), turn(family, 1, first=False)])
    assert torch.equal(ours, expected)
    assert torch.equal(run.logits, clean.logits)


# -- errors --------------------------------------------------------------------------------------


def vision_of(model):
    inner = model.model
    for name in ("vision_tower", "visual", "vision_model"):
        if hasattr(inner, name):
            return getattr(inner, name)
    raise AssertionError("a family with another name for its image encoder")


def places(model):
    """A few modules at which a forward can fail: name, module, call within a prefill."""
    layers = (
        model.model.language_model
        if hasattr(model.model, "language_model")
        else (model.model.text_model)
    )
    return {
        "first layer": (layers.layers[0], 1),
        "third layer": (layers.layers[2], 1),
        "second chunk of a layer": (layers.layers[1], 2),
        "last norm": (layers.norm, 1),
        "head": (model.lm_head, 1),
        "image encoder": (vision_of(model), 1),
    }


PLACES = (
    "first layer",
    "third layer",
    "second chunk of a layer",
    "last norm",
    "head",
    "image encoder",
)


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_failing_prefill_leaves_the_model_as_it_was(family, place, kind):
    model, _ = tiny_model(family)
    inputs, expected = turn(family, 1), plain_logits(model, turn(family, 1))
    before = fingerprint(model)
    module, call = places(model)[place]
    with (
        torch.inference_mode(),
        failing(module, call, kind),
        pytest.raises(kind),
        compress(model, "tgv-kv:0.4", prefill_chunk=16),
    ):
        model(**inputs)
    assert fingerprint(model) == before
    assert torch.equal(plain_logits(model, inputs), expected)


@pytest.mark.parametrize("plan", [*PLANS, "knorm:0.4(cover=0.5, cover_by=features)"])
@pytest.mark.parametrize("place", PLACES)
def test_a_failing_turn_leaves_the_cache_as_it_was(plan, place):
    """The same turn, tried again, is what it is without the failure."""
    family = "qwen3-vl"
    model, _ = tiny_model(family)
    first, second = turn(family, 1), turn(family, 1, seed=3, first=False)
    parts = [first, tokens(70), tokens(71)]
    expected = converse(model, plan, [*parts, second, tokens(72)], chunk=16)
    run = converse(model, plan, parts, chunk=16)
    module, call = places(model)[place]
    for attempt in (1, 2):
        with failing(module, call, Boom), pytest.raises(Boom):
            converse(model, plan, [second], chunk=16, cache=run.cache)
        assert same_held(held(run.cache), run.held), attempt
    again = converse(model, plan, [second, tokens(72)], chunk=16, cache=run.cache)
    rows = len(again.logits)
    assert error(again.logits, expected.logits[-rows:]) < TOLERANCE
    assert same_held(held(run.cache), expected.held)


@dataclass(frozen=True)
class FailsInScore(SnapKv):
    """Raises while a later layer is scored, until told otherwise."""

    name = "fails-in-score"

    def score(self, view):
        if view.layer == 2 and FAIL[0]:
            raise Boom
        return super().score(view)


@dataclass(frozen=True)
class FailsInSelect(SnapKv):
    """Raises when the first layer is chosen already."""

    name = "fails-in-select"

    def keep(self, view, scores, budget):
        if view.layer == 2 and FAIL[0]:
            raise Boom
        return super().keep(view, scores, budget)


FAIL = [False]


@pytest.mark.parametrize("method", [FailsInScore, FailsInSelect])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_method_that_raises_leaves_the_cache_as_it_was(method, turns):
    family = "llava-next"
    model, _ = tiny_model(family)
    plan = Plan((method(budget=0.4, window=4),))
    parts = [turn(family, 1), tokens(70), turn(family, 1, first=False)][: 2 * turns - 1]
    before = fingerprint(model)
    expected = converse(model, plan, parts)
    run = converse(model, plan, parts[:-1])
    FAIL[0] = True
    try:
        with pytest.raises(Boom):
            converse(model, plan, parts[-1:], cache=run.cache)
    finally:
        FAIL[0] = False
    assert fingerprint(model) == before
    converse(model, plan, parts[-1:], cache=run.cache)
    assert same_held(held(run.cache), expected.held)


def test_keeping_that_fails_halfway_is_undone(monkeypatch):
    from conduit_kv.cache import VisualLayer

    family = "llava"
    model, _ = tiny_model(family)
    parts = [turn(family, 1), tokens(70), turn(family, 1, first=False), tokens(71)]
    expected = converse(model, "h2o:0.4", parts)
    run = converse(model, "h2o:0.4", parts[:2])
    keep, calls = VisualLayer.keep, [0]

    def fails(self, *arguments):
        calls[0] += 1
        if calls[0] == 3:
            raise Boom
        keep(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(VisualLayer, "keep", fails)
        with pytest.raises(Boom):
            converse(model, "h2o:0.4", parts[2:3], cache=run.cache)
    assert same_held(held(run.cache), run.held)
    again = converse(model, "h2o:0.4", parts[2:], cache=run.cache)
    assert same_held(again.held, expected.held)
    assert error(again.logits, expected.logits[-len(again.logits) :]) < TOLERANCE


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("plan", ["full", "snapkv:0.4(window=4)", "tova:0.4", "ada-kv:0.4"])
def test_a_failing_decoding_step_is_undone_or_the_cache_says_so(plan, layer):
    model, _ = tiny_model("llava")
    parts = [turn("llava", 1), tokens(70)]
    expected = converse(model, plan, [*parts, tokens(71)])
    run = converse(model, plan, parts)
    with failing(model.model.language_model.layers[layer], 1, Boom), pytest.raises(Boom):
        converse(model, plan, [tokens(71)], cache=run.cache)
    if plan == "tova:0.4" and layer == 3:
        for ids in (tokens(71), tokens(71, 72), tokens(71)):
            with pytest.raises(InputError, match="start from a new prefill"):
                converse(model, plan, [ids], cache=run.cache)
        with pytest.raises(InputError, match="start from a new prefill"):
            run.cache.fork()
    else:
        again = converse(model, plan, [tokens(71)], cache=run.cache)
        assert torch.equal(again.logits, expected.logits[-1:])
        assert same_held(held(run.cache), expected.held)


def test_a_refused_call_does_not_spoil_the_cache():
    """Nothing ran: the cache is as good as before."""
    model, _ = tiny_model("llava")
    run = converse(model, "tova:0.4", [turn("llava", 1), tokens(70)])
    wrong = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(InputError, match="attention_mask"), compress(model, "tova:0.4"):
        model(**tokens(71), attention_mask=wrong, **with_cache(model, run.cache))
    assert len(converse(model, "tova:0.4", [tokens(71)], cache=run.cache).logits) == 1


def test_a_session_goes_on_after_a_failing_turn():
    model, processor = tiny_model("qwen2.5-vl")
    vlm, layers = VLM(model, processor), model.model.language_model.layers
    plan = "snapkv:0.4(window=4)"
    expected, _ = answer(vlm, plan, 5)
    session = vlm.session(plan)
    stream = script(session, 5)
    replies = []
    for reply in stream:
        if reply is not None:
            replies.append(reply)
            break
    with failing(layers[1], 1, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        session.ask("lost", [picture(28, 28, 9)])
    replies += [reply for reply in stream if reply is not None]
    for one, other in zip(replies, expected, strict=True):
        same_reply(one, other)


def test_a_stream_that_is_left_early_is_a_shorter_answer():
    model, processor = tiny_model("llava")
    vlm = VLM(model, processor)
    left, whole = vlm.session("tova:0.4"), vlm.session("tova:0.4")
    stream = left.stream("What is this?", [picture(28, 28)], max_new_tokens=9)
    for _ in range(3):
        next(stream)
    stream.close()
    seen = len(left.state.ids) + len(left._pending)
    asked = len(vlm.process(vlm.render(left.messages[:1]), [picture(28, 28)])["input_ids"][0])
    reply = whole.ask("What is this?", [picture(28, 28)], max_new_tokens=seen - asked)
    assert left.messages == whole.messages
    assert len(reply.tokens) == seen - asked
    one, other = (session.ask("And?", max_new_tokens=4) for session in (left, whole))
    same_reply(one, other)


# -- nesting and threads ---------------------------------------------------------------------------


def test_nested_compress_is_an_error():
    model, _ = tiny_model("llava")
    inputs, before = turn("llava", 1), fingerprint(model)
    with as_it_was(model), compress(model, "snapkv:0.4") as run:
        refused = pytest.raises(PlanError, match="active on this model already")
        with refused, compress(model, "full"):
            pass
        model(**inputs)
        assert run.report.plan == "snapkv:0.4"
    assert fingerprint(model) == before
    with compress(model, "full"):
        pass


def test_two_models_do_not_disturb_each_other():
    one, _ = tiny_model("llava")
    other, _ = tiny_model("qwen3-vl")
    expected = [
        converse(one, "tova:0.4", [turn("llava", 1), tokens(70)]),
        converse(other, "snapkv:0.4", [turn("qwen3-vl", 1), tokens(70)]),
    ]
    with torch.inference_mode(), compress(one, "tova:0.4"), compress(other, "snapkv:0.4"):
        first = one(**turn("llava", 1))
        second = other(**turn("qwen3-vl", 1))
    for output, run in zip((first, second), expected, strict=True):
        assert torch.equal(output.logits[0], run.logits[:-1])


def in_thread(work):
    """Run ``work`` in a thread of its own; gives its result, or raises its error."""
    outcome: list = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as caught:
            outcome.append((None, caught))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def test_threads_of_one_vlm_answer_as_each_does_alone():
    model, processor = tiny_model("qwen2.5-vl")
    vlm = VLM(model, processor)
    before = fingerprint(model)
    expected = [answer(vlm, plan, seed)[0] for seed, plan in enumerate(PLANS)]
    together = threading.Barrier(len(PLANS))

    def work(seed, plan):
        together.wait()
        return answer(vlm, plan, seed)[0]

    threads = [
        in_thread(lambda seed=seed, plan=plan: work(seed, plan)) for seed, plan in enumerate(PLANS)
    ]
    for thread, _ in threads:
        thread.join()
    for (_, outcome), replies in zip(threads, expected, strict=True):
        found, caught = outcome[0]
        assert caught is None, caught
        for one, other in zip(found, replies, strict=True):
            same_reply(one, other)
    assert fingerprint(model) == before


def test_a_second_thread_is_refused_while_compress_is_active():
    model, processor = tiny_model("llava")
    vlm, inputs = VLM(model, processor), turn("llava", 1)
    expected = converse(model, "tova:0.4", [inputs, tokens(70)])

    def other_block():
        with compress(model, "full"):
            model(**inputs)

    def other_ask():
        return vlm.ask("What?", [picture(28, 28)], max_new_tokens=1)

    with torch.inference_mode(), compress(model, "tova:0.4") as run:
        first = model(**inputs)
        for work in (other_block, other_ask):
            thread, outcome = in_thread(work)
            thread.join()
            assert isinstance(outcome[0][1], PlanError)
        second = model(**tokens(70), **with_cache(model, run.cache))
    found = torch.cat([first.logits[0], second.logits[0]])
    assert torch.equal(found, expected.logits)


def test_generate_may_run_in_a_thread_of_the_block():
    """As a streamer is usually used."""
    model, _ = tiny_model("llava")
    inputs = turn("llava", 1)
    options = {"max_new_tokens": 4, "do_sample": False}
    with as_it_was(model), compress(model, "tova:0.4"):
        expected = model.generate(**inputs, **options)
        thread, outcome = in_thread(lambda: model.generate(**inputs, **options))
        thread.join()
    assert torch.equal(outcome[0][0], expected)


def test_the_eviction_of_a_fork_is_its_own():
    """Decoding on a fork changes nothing for the others."""
    model, _ = tiny_model("llava")
    parts = [turn("llava", 1), tokens(70)]
    run = converse(model, "tova:0.4", parts)
    fork = run.cache.fork()
    expected = converse(model, "tova:0.4", [*parts, tokens(71), tokens(72)])
    converse(model, "tova:0.4", [tokens(90), tokens(91), turn("llava", 1)], cache=fork)
    assert isinstance(fork.eviction, Eviction) and fork.eviction.cache is borrowed(fork)
    again = converse(model, "tova:0.4", [tokens(71), tokens(72)], cache=run.cache)
    assert torch.equal(again.logits, expected.logits[-2:])
    assert same_held(again.held, expected.held)
