"""Contract 2 for several requests at once: decoded together or forked, each is as if alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv import VLM, InputError, PlanError
from conduit_kv.engine.request import JoinedCache
from conduit_kv.plan import Plan
from tests.contracts.helpers import (
    EVICT,
    TOLERANCE,
    batch_and_singles,
    compress,
    error,
    examples,
    held,
    plan_of,
    same_held,
    turn,
)
from tests.tiny import FAMILY_NAMES, NAMES, tiny_model

STEPS = 4


def vlm_of(name):
    return VLM(*tiny_model(name))


def same_state(one, other):
    assert error(one.logits, other.logits) < TOLERANCE
    assert same_held(held(one.cache), held(other.cache))
    assert one.ids == other.ids
    mine, its = (state.cache.progress.position_ids(0) for state in (one, other))
    assert torch.equal(mine, its)
    assert one.report.sequences == other.report.sequences
    assert one.report.notes == other.report.notes


def mixed(name, plans):
    """Inputs of different lengths, some without images, one per plan."""
    return [turn(name, number % 3, " Why" * (number + 1) + "?") for number in range(len(plans))]


@pytest.mark.parametrize("name", NAMES)
def test_requests_decoded_together_answer_as_each_does_alone(name):
    """Different plans, lengths and images in one batch."""
    vlm = vlm_of(name)
    shift = NAMES.index(name)
    plans = [plan_of(EVICT[(shift + 3 * n) % len(EVICT)], 0.4) for n in range(4)]
    inputs = mixed(name, plans)
    alone = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    expected = [vlm.decode_together([state], STEPS)[0] for state in alone]
    states = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    assert vlm.decode_together(states, STEPS) == expected
    for one, other in zip(states, alone, strict=True):
        same_state(one, other)


@pytest.mark.parametrize("method", EVICT)
def test_every_method_decodes_in_a_batch(method):
    name = FAMILY_NAMES[EVICT.index(method) % len(FAMILY_NAMES)]
    vlm = vlm_of(name)
    plans = [plan_of(method, budget) for budget in (0.3, 0.6, 9)]
    inputs = mixed(name, plans)
    alone = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    states = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    for token in (70, 71, 72):
        vlm.step(states, [token] * len(states))
        for state in alone:
            vlm.step([state], [token])
    for one, other in zip(states, alone, strict=True):
        same_state(one, other)


def test_an_answer_that_ends_leaves_the_batch(monkeypatch):
    vlm = vlm_of("llava")
    plans = ["full", "tova:0.4", "snapkv:0.5(window=4)"]
    inputs = mixed("llava", plans)

    def prefilled():
        return [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]

    free = vlm.decode_together(prefilled(), 6)
    monkeypatch.setattr(vlm, "end_tokens", lambda: frozenset([free[1][2]]))
    expected = [answer[: answer.index(end)] if end in answer else answer
                for end in (free[1][2],) for answer in free]  # fmt: skip
    states = prefilled()
    assert vlm.decode_together(states, 6) == expected
    assert len({len(answer) for answer in expected}) > 1


@pytest.mark.parametrize("evict", [True, False])
@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_a_turn_of_several_tokens_together(name, evict):
    vlm = vlm_of(name)
    plans = ["full", "tgv-kv:0.4", "h2o:0.4", "ada-kv:0.5(window=2)", "tova:0.4"]
    inputs = mixed(name, plans)
    ids = torch.tensor([[70 + n, 71, 72 + n, 73] for n in range(len(plans))])
    alone = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    alone = [
        vlm.extend(state, {"input_ids": ids[row : row + 1]}, evict=evict)
        for row, state in enumerate(alone)
    ]
    states = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    vlm.extend_together(states, ids, evict=evict)
    for one, other in zip(states, alone, strict=True):
        same_state(one, other)
    vlm.step(states, [80] * len(states))
    for row, (one, other) in enumerate(zip(states, alone, strict=True)):
        vlm.step([other], [80])
        same_state(one, other)
        held_now = len(held(one.cache)[0][0])
        assert row == 0 or held_now < one.cache.get_seq_length()


def test_a_failing_step_of_a_batch_is_undone_for_all():
    vlm = vlm_of("llava")
    plans = ["full", "snapkv:0.4(window=4)", "ada-kv:0.4(window=4)"]
    inputs = mixed("llava", plans)
    states = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]
    alone = [vlm.prefill(part, plan) for part, plan in zip(inputs, plans, strict=True)]

    def boom(*_):
        raise KeyboardInterrupt

    handle = vlm.model.model.language_model.layers[2].register_forward_pre_hook(boom)
    with pytest.raises(KeyboardInterrupt):
        vlm.step(states, [70, 71, 72])
    handle.remove()
    vlm.step(states, [73, 74, 75])
    for state, other, token in zip(states, alone, (73, 74, 75), strict=True):
        vlm.step([other], [token])
        same_state(state, other)


def test_caches_of_batches_cannot_be_joined():
    model, _ = tiny_model("llava")
    inputs, _ = batch_and_singles("llava", (1, 0))
    with torch.inference_mode(), compress(model, "full") as run:
        model(**inputs)
    with pytest.raises(PlanError, match="one sequence each"):
        JoinedCache([run.cache])
    with pytest.raises(PlanError, match="at least one"):
        JoinedCache([])
    vlm = vlm_of("llava")
    state = vlm.prefill(turn("llava", 1))
    with pytest.raises(PlanError, match="named twice"):
        vlm.step([state, state], [70, 71])
    with pytest.raises(InputError, match="one prompt"):
        vlm.prefill(inputs)
    with pytest.raises(InputError, match="one prompt"):
        vlm.extend(state, {name: value[1:] for name, value in inputs.items() if "pix" not in name})


# -- forks -----------------------------------------------------------------------------------------


def check_forks(name, plans, images=2, chunk=None):
    """Forks of one prefill, decoded in turn, and the same prompts prefilled apart."""
    vlm = vlm_of(name)
    inputs, plans = turn(name, images), [Plan.of(plan) for plan in plans]
    whole = vlm.prefill(inputs, "full", watch=plans, chunk=chunk)
    forks = vlm.forks(whole, plans)
    apart = [vlm.prefill(inputs, plan) for plan in plans]
    for one, other in zip(forks, apart, strict=True):
        assert one.cache.plan == other.cache.plan
        same_state(one, other)
    for token in (70, 71):
        for state in [*forks, *apart]:
            vlm.step([state], [token])
    later = turn(name, 1, " And?", seed=1, first=False)
    forks = [vlm.extend(state, later) for state in forks]
    apart = [vlm.extend(state, later) for state in apart]
    for one, other in zip(forks, apart, strict=True):
        same_state(one, other)
    vlm.step([whole], [70])
    lone = vlm.prefill(inputs, "full")
    vlm.step([lone], [70])
    same_state(whole, lone)


@pytest.mark.parametrize("name", NAMES)
def test_forks_of_a_watched_prefill_equal_prefills_of_their_own(name):
    """Every method, on every model, windows included."""
    check_forks(name, [plan_of(method, 0.4) for method in EVICT])


@examples(6)
@given(
    name=st.sampled_from(FAMILY_NAMES),
    methods=st.lists(st.sampled_from(EVICT), min_size=1, max_size=3),
    budget=st.sampled_from([0.05, 0.8, 1.0, 12, "30KB"]),
    options=st.sampled_from([(), ("of=visual",), ("cover=0.5", "cover_by=features")]),
    images=st.integers(0, 2),
    chunk=st.sampled_from([None, 11]),
)
def test_forks_under_any_options(name, methods, budget, options, images, chunk):
    methods = [method for method in methods if method != "uniform" or options[:1] != ("cover=0.5",)]
    check_forks(name, [plan_of(method, budget, *options) for method in methods], images, chunk)


def test_a_fork_needs_its_watcher():
    vlm = vlm_of("llava")
    plans = [Plan.of("tova:0.4"), Plan.of("knorm:0.4")]
    state = vlm.prefill(turn("llava", 1), "full", watch=plans)
    with pytest.raises(PlanError, match="watched"):
        vlm.forks(state, plans[:1])
    vlm.forks(state, plans)
    with pytest.raises(PlanError, match="watched"):
        vlm.forks(state, plans)
