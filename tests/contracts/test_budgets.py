"""Contract 6: eviction of what does not matter changes nothing, and no budget is a cliff."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conduit_kv.budget import Budget
from conduit_kv.engine.report import Report
from conduit_kv.engine.runner import Runner
from conduit_kv.families import family_of
from conduit_kv.methods.cover import cover_ranks
from conduit_kv.methods.evict import EvictMethod, Scores
from conduit_kv.plan import Plan
from conduit_kv.view import LayerView
from tests.contracts.helpers import (
    EVICT,
    TOLERANCE,
    converse,
    eager,
    error,
    examples,
    joined,
    plain_logits,
    plan_of,
    process,
    sampled,
    text_of,
    tokens,
    turn,
)
from tests.families.helpers import reaching_text_model
from tests.tiny import FAMILY_NAMES, tiny_model
from tests.tiny.models import TINY

FLOOR = 5
LAYERS = 4


def mean_held(run) -> list[float]:
    """Tokens held per layer, mean over KV heads."""
    return [sum(len(head) for head in heads) / len(heads) for heads in run.held]


@dataclass(frozen=True)
class Chosen(EvictMethod):
    """Keeps what it is told to, the same for all heads of a layer."""

    name: ClassVar[str] = "chosen"
    masks: tuple[Tensor, ...] = ()

    def score(self, view: LayerView) -> Scores:
        return Scores(self.masks[view.layer].float())

    def keep(self, view: LayerView, scores: Scores, budget: int) -> Sequence[Tensor]:
        return [torch.nonzero(self.masks[view.layer]).flatten()]


def attention_of_answer(model, inputs, answer) -> list[Tensor]:
    """Per layer ``[T]``: the most attention that a prompt token gets from an answer's token."""
    family = family_of(model)
    text = family.text_model(model)
    length = inputs["input_ids"].shape[1]
    whole = joined([inputs, tokens(*answer)])
    given = reaching_text_model(family, model, model, **whole)
    names = ("inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks",
             "deepstack_visual_embeds")  # fmt: skip
    given = {name: given[name] for name in names if given.get(name) is not None}
    with torch.inference_mode(), eager(text):
        weights = text(**given, output_attentions=True, use_cache=False).attentions
    return [layer[0, :, length:, :length].amax((0, 1)) for layer in weights]


def sharpened(name):
    """A copy whose attention is so peaked that most tokens get almost none."""
    model = copy.deepcopy(tiny_model(name)[0])
    for layer in family_of(model).layers(family_of(model).text_model(model)):
        attention = layer.self_attn
        with torch.no_grad():
            if hasattr(attention, "q_norm"):  # what it is applied to has length one
                attention.q_norm.weight.mul_(4)
                attention.k_norm.weight.mul_(3)
            else:
                attention.q_proj.weight.mul_(5)
    return model


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_evicting_what_gets_no_attention_keeps_the_answer(family):
    model = sharpened(family)
    inputs, answer = turn(family, 2), (70, 71, 72)
    mass = attention_of_answer(model, inputs, answer)
    gone = [layer < 1e-4 for layer in mass]
    assert sum(int(layer.sum()) for layer in gone) >= 12  # or there is nothing to test
    parts = [inputs, *(tokens(token) for token in answer)]
    full = converse(model, "full", parts).logits
    light = converse(model, Plan((Chosen(masks=tuple(~g for g in gone), budget=0.5),)), parts)
    assert [len(heads[0]) for heads in light.held] == [
        len(layer) + len(answer) - int(layer.sum()) for layer in gone
    ]
    rows = slice(-len(answer), None)
    slightly = error(light.logits[rows], full[rows])
    assert 0 < slightly < 0.01
    # As many of the tokens that do get attention, for comparison.
    heavy = []
    for layer, evicted in zip(mass, gone, strict=True):
        mask = torch.ones(len(layer), dtype=torch.bool)
        mask[layer.topk(int(evicted.sum())).indices] = False
        heavy.append(mask)
    much = converse(model, Plan((Chosen(masks=tuple(heavy), budget=0.5),)), parts)
    assert error(much.logits[rows], full[rows]) > 20 * slightly


@pytest.mark.parametrize(("family", "method"), sampled(2))
def test_every_budget_is_met_exactly(family, method):
    """As tokens, from one to more than there are: a layer's mean is the budget, to the token."""
    if method == "full":
        pytest.skip("takes no budget")
    model, _ = tiny_model(family)
    inputs = turn(family, 1)
    length = inputs["input_ids"].shape[1]
    for budget in (1, 4, 5, 6, length // 2, length - 1, length, length + 1, 10 * length):
        run = converse(model, plan_of(method, budget), [inputs])
        found = sum(mean_held(run))
        assert found == LAYERS * min(max(budget, FLOOR), length), budget
        told = any("floor" in note for note in run.notes)
        assert told == (budget < FLOOR), (budget, run.notes)
    expected = plain_logits(model, inputs)[0]
    assert error(run.logits, expected) < TOLERANCE


@examples(40)
@given(
    family=st.sampled_from(FAMILY_NAMES),
    method=st.sampled_from([name for name in EVICT if name != "full"]),
    share=st.floats(1e-4, 1.0, exclude_max=True),
    images=st.integers(0, 2),
    of=st.sampled_from(["prompt", "visual"]),
    per=st.sampled_from(["sequence", "image"]),
)
def test_any_share_is_met_exactly(family, method, share, images, of, per):
    model, _ = tiny_model(family)
    inputs = turn(family, images)
    run = converse(model, plan_of(method, share, f"of={of}", f"per={per}"), [inputs])
    layout = run.cache.progress.layouts[0]
    report = Report.of(run.cache).sequences[0]
    visual = int(layout.visual.sum())
    if of == "visual":
        assert all(layer.text == len(layout) - visual for layer in report.layers)
        assert sum(sum(layer.images) for layer in report.layers) == round(share * LAYERS * visual)
    else:
        budget = round(share * LAYERS * len(layout))
        assert sum(mean_held(run)) == max(budget, LAYERS * min(FLOOR, len(layout)))


@pytest.mark.parametrize("budget", ["0.0001", "1", "1B"])
@pytest.mark.parametrize("method", [name for name in EVICT if name != "full"])
def test_a_budget_that_floors_to_nothing_answers(method, budget):
    family = FAMILY_NAMES[EVICT.index(method) % len(FAMILY_NAMES)]
    model, _ = tiny_model(family)
    parts = [turn(family, 1), tokens(70), turn(family, 0, first=False), tokens(71)]
    run = converse(model, plan_of(method, budget), parts)
    assert torch.isfinite(run.logits).all()
    assert all(count >= FLOOR for count in mean_held(run))
    assert any("floor" in note for note in run.notes)
    visual = converse(model, plan_of(method, budget, "of=visual"), parts)
    layout = visual.cache.progress.layouts[0]
    assert torch.isfinite(visual.logits).all()
    for heads in visual.held:
        for head in heads:
            assert int(layout.text[head].sum()) == int(layout.text.sum())
    first = converse(model, plan_of(method, budget, "of=visual"), parts[:1])
    kept = sum(sum(layer.images) for layer in Report.of(first.cache).sequences[0].layers)
    assert kept == (LAYERS if budget == "1" else 0)


@pytest.mark.parametrize("method", [name for name in EVICT if name != "full"])
@pytest.mark.parametrize("budget", ["0.01", "0.6", "3"])
def test_prompts_shorter_than_the_floor_are_kept(method, budget):
    model, _ = tiny_model("llava")
    for length in (1, 2, 4, FLOOR):
        parts = [tokens(*range(60, 60 + length)), tokens(70)]
        run = converse(model, plan_of(method, budget), parts)
        assert torch.isfinite(run.logits).all()
        expected = converse(model, "full", parts)
        if length > 1:
            first = [len(head) for heads in run.steps[1].before for head in heads]
            assert set(first) == {length}
        assert error(run.logits, expected.logits) < TOLERANCE


@pytest.mark.parametrize("method", [name for name in EVICT if name != "full"])
def test_one_token_more_than_the_budget_is_no_cliff(method):
    """At a budget of one token less than the prompt, almost everything is still there."""
    model, _ = tiny_model("llava")
    inputs = turn("llava", 1)
    length = inputs["input_ids"].shape[1]
    run = converse(model, plan_of(method, length - 1), [inputs])
    assert sum(mean_held(run)) == LAYERS * (length - 1)
    least = min(len(head) for heads in run.held for head in heads)
    assert least >= length - LAYERS * 2


@pytest.mark.parametrize("method", ["tgv-kv", "tova", "streaming-llm", "h2o"])
@pytest.mark.parametrize("budget", ["0.5", "20"])
def test_a_layer_never_exceeds_its_share_while_it_decodes(method, budget):
    model, _ = tiny_model("llava-next")
    options = ("heads=all",) if method == "h2o" else ()
    first = turn("llava-next", 1)
    run = converse(model, plan_of(method, budget, *options), [first])
    granted, then = [len(heads[0]) for heads in run.held], run.cache.get_seq_length()
    for number in range(12):
        converse(model, run.cache.plan, [tokens(70 + number)], cache=run.cache)
        now = run.cache.get_seq_length()
        for heads, count in zip(run.held, granted, strict=True):
            share = count if budget == "20" else -(-count * now // then)
            assert len(heads[0]) == min(share, now)


@pytest.mark.parametrize("method", ["knorm", "tgv-kv", "ada-kv"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_cover_by_features_reads_the_features_of_its_own_tokens(family, method):
    """After decoded tokens and in later turns too; ``cover=1`` leaves nothing to the score."""
    model, _ = tiny_model(family)
    parts = [
        turn(family, 1),
        tokens(70),
        tokens(71),
        turn(family, 1, seed=1, first=False),
        tokens(72),
    ]
    plan = plan_of(method, 0.5, "of=visual", "cover=1.0", "cover_by=features")
    run = converse(model, plan, parts)
    layout = run.cache.progress.layouts[0]
    whole = joined(parts)
    features = reaching_text_model(family_of(model), model, model, **whole)["inputs_embeds"][0]
    rank = cover_ranks(layout, features)
    first = run.steps[0].stop
    contested = 0
    for before, after in zip(run.steps[3].before, run.held, strict=True):
        for old, new in zip(before, after, strict=True):
            visual = torch.nonzero(layout.visual).flatten()
            candidates = visual[torch.isin(visual, old) | (visual >= first)]
            kept = new[layout.visual[new]]
            best = candidates[rank[candidates].sort().indices][: len(kept)]
            assert kept.tolist() == best.sort().values.tolist()
            contested += 0 < len(kept) < len(candidates)
    assert contested >= 3


def test_bytes_are_shared_over_all_layers():
    model, _ = tiny_model("qwen2.5-vl")
    run = converse(model, "snapkv:20KB(window=4)", [turn("qwen2.5-vl", 2)])
    per_token = 2 * 2 * 16 * 4  # K and V, two heads, sixteen numbers of four bytes
    assert sum(mean_held(run)) == 20_000 // per_token
    assert Report.of(run.cache).kv_bytes <= 20_000
    assert Budget.parse("20KB").total([100] * 4, per_token) == 20_000 // per_token


def test_text_alone_has_a_defined_result():
    """No image at all: ``of=visual`` keeps everything, other plans their share of the text."""
    for family in FAMILY_NAMES:
        model, _ = tiny_model(family)
        inputs = process(family, [text_of(family, 0, " Where is the red dog?")], [[]])
        assert TINY[family].image
        length = inputs["input_ids"].shape[1]
        run = converse(model, "tgv-kv:0.5", [inputs, tokens(70)])
        assert sum(len(h[0]) for h in run.steps[1].before) == round(0.5 * LAYERS * length)
        run = converse(model, "tgv-kv:0.5(of=visual)", [inputs, tokens(70)])
        assert all(len(heads[0]) == length + 1 for heads in run.held)


@pytest.mark.parametrize("family", ["llava", "qwen3-vl"])
def test_layers_run_a_few_tokens_beyond_their_share_between_evictions(family):
    every = 4
    vlm = Runner(*tiny_model(family), family)
    state = vlm.prefill(turn(family, 2), f"tgv-kv:0.6(every={every})")
    cache, went = state.cache, set()
    for _ in range(30):
        before = [layer.slots for layer in cache]
        vlm.step([state], [7])
        for number, layer in enumerate(cache):
            granted, then = cache.eviction.budgets[number][0]
            share = Budget(0.6).target(granted, then, cache.progress.counts[0])
            assert layer.slots < share + every
            went.add(before[number] + 1 - layer.slots)
    assert went == {0, every}
