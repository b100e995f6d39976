"""Contract 3 under ``generate``: beams, samples, continued caches, and what stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from conduit_kv import PlanError, compress
from tests.contracts.helpers import (
    TOLERANCE,
    as_it_was,
    batch_and_singles,
    converse,
    error,
    held,
    plain_logits,
    plan_of,
    same_held,
    sampled,
    tokens,
    turn,
    with_cache,
)
from tests.tiny import FAMILY_NAMES, tiny_model

IN_DECODE = (
    "tgv-kv:0.4",
    "h2o:0.4(heads=all)",
    "tova:0.4",
    "streaming-llm:0.4",
    "ada-kv:0.4(window=4, kernel=3)",
)
"""Plans that evict in decoding, and one whose heads differ in number."""


def generate(model, inputs, plan=None, **options):
    """``generate`` under ``plan``, or plain; greedy, with scores."""
    settings = {
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    with as_it_was(model):
        if plan is None:
            return model.generate(**inputs, **settings | options)
        with compress(model, plan) as run:
            output = model.generate(**inputs, **settings | options)
    output.cache_of_run = run.cache
    return output


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_beams_of_a_padded_batch_equal_plain(family):
    model, _ = tiny_model(family)
    inputs, _ = batch_and_singles(family, (1, 0, 2))
    options = {"num_beams": 3, "num_return_sequences": 2}
    plain = generate(model, inputs, **options)
    ours = generate(model, inputs, "full", **options)
    assert torch.equal(ours.sequences, plain.sequences)
    assert error(ours.sequences_scores, plain.sequences_scores) < TOLERANCE


@pytest.mark.parametrize("plan", IN_DECODE)
@pytest.mark.parametrize("family", ["llava", "qwen3-vl", "idefics3"])
def test_each_beam_scores_what_it_scores_alone(family, plan):
    """Beams are copied and reordered with what they hold: the score is that of a single run."""
    model, _ = tiny_model(family)
    inputs, singles = batch_and_singles(family, (1, 0))
    new = 5
    ours = generate(
        model,
        inputs,
        plan,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=new,
        length_penalty=0.0,
        eos_token_id=None,
    )
    answers = ours.sequences[:, inputs["input_ids"].shape[1] :]
    assert len({tuple(answer.tolist()) for answer in answers[:3]}) == 3
    for number, answer in enumerate(answers):
        alone = converse(model, plan, [singles[number // 3], *(tokens(int(t)) for t in answer)])
        start = alone.steps[0].stop
        scores = alone.logits[start - 1 : start - 1 + new].log_softmax(-1)
        expected = scores[torch.arange(new), answer].sum()
        assert abs(float(ours.sequences_scores[number] - expected)) < 1e-4


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_samples_with_a_seed_equal_plain(family):
    model, _ = tiny_model(family)
    inputs = turn(family, 1)
    options = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 2}
    outputs = []
    for plan in (None, "snapkv:1.0"):
        torch.manual_seed(7)
        outputs.append(generate(model, inputs, plan, **options))
    plain, ours = outputs
    assert torch.equal(ours.sequences, plain.sequences)
    assert not torch.equal(plain.sequences[0], plain.sequences[1])


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("plan", ["full", "tgv-kv:0.3"])
def test_a_streamer_gets_every_token(plan):
    model, _ = tiny_model("qwen3-vl")
    streamer = Collector()
    output = generate(model, turn("qwen3-vl", 1), plan, streamer=streamer)
    assert streamer.ended and streamer.tokens == output.sequences[0].tolist()


@pytest.mark.parametrize(("family", "method"), sampled(1))
def test_the_cache_that_generate_returns_can_be_continued(family, method):
    """With the full ids again, as Transformers wants it, and a new image."""
    model, _ = tiny_model(family)
    plan = plan_of(method, 0.4)
    first, second = turn(family, 1), turn(family, 1, " And this?", seed=1, first=False)
    answer = generate(model, first, plan)
    cache = answer.past_key_values
    assert cache is answer.cache_of_run
    start = first["input_ids"].shape[1]
    new = answer.sequences[0, start:].tolist()
    assert cache.get_seq_length() == start + len(new) - 1  # the last one has not run yet
    ids = torch.cat([answer.sequences, second["input_ids"]], dim=1)
    inputs = {**second, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if "mm_token_type_ids" in second:
        types = second["mm_token_type_ids"]
        before = torch.zeros_like(answer.sequences)
        inputs["mm_token_type_ids"] = torch.cat([before, types], dim=1)
    again = generate(model, {**inputs, **with_cache(model, cache)}, plan)

    following = again.sequences[0, ids.shape[1] :].tolist()
    pending = {**second, "input_ids": ids[:, start + len(new) - 1 :]}
    if "mm_token_type_ids" in pending:
        pending["mm_token_type_ids"] = inputs["mm_token_type_ids"][:, start + len(new) - 1 :]
    parts = [first, *(tokens(t) for t in new[:-1]), pending, *(tokens(t) for t in following[:-1])]
    expected = converse(model, plan, parts)
    assert same_held(held(cache), expected.held)
    greedy = expected.logits.argmax(-1)
    assert greedy[ids.shape[1] - 1 :].tolist() == following
    scores = torch.stack(again.scores, 1)[0]
    assert error(scores, expected.logits[ids.shape[1] - 1 :]) < TOLERANCE
    assert torch.equal(cache.progress.position_ids(0), expected.cache.progress.position_ids(0))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_hidden_states_equal_plain(family):
    model, _ = tiny_model(family)
    inputs = turn(family, 1)
    with as_it_was(model):
        plain = model(**inputs, output_hidden_states=True).hidden_states
    for chunk in (None, 7):
        with as_it_was(model), compress(model, "full", prefill_chunk=chunk):
            ours = model(**inputs, output_hidden_states=True).hidden_states
        assert len(ours) == len(plain)
        for mine, expected in zip(ours, plain, strict=True):
            assert error(mine, expected) < TOLERANCE


@pytest.mark.parametrize("plan", ["snapkv:1.0", "snapkv:0.3"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_labels_give_the_plain_loss(family, plan):
    """Eviction acts after the prompt's logits, so that the loss is that of the plain model."""
    model, _ = tiny_model(family)
    inputs = turn(family, 1)
    labels = inputs["input_ids"].clone()
    labels[:, :5] = -100
    with as_it_was(model):
        plain = model(**inputs, labels=labels).loss
    with as_it_was(model), compress(model, plan):
        ours = model(**inputs, labels=labels).loss
    assert abs(float(ours - plain)) < 1e-5


def test_training_mode_gives_the_plain_gradients():
    shared, _ = tiny_model("qwen3-vl")
    model = copy.deepcopy(shared).train()
    inputs = turn("qwen3-vl", 1)
    found = []
    for plan in (None, "snapkv:1.0"):
        model.zero_grad()
        if plan is None:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
        else:
            with compress(model, plan):
                loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        weights = model.model.language_model.layers
        found.append([layer.self_attn.k_proj.weight.grad.clone() for layer in weights])
    for mine, expected in zip(found[1], found[0], strict=True):
        assert error(mine, expected) < 1e-4


@pytest.mark.parametrize("plan", ["full", "tova:0.4"])
def test_a_cache_can_be_cropped_where_nothing_was_evicted(plan):
    model, _ = tiny_model("qwen2.5-vl")
    first = turn("qwen2.5-vl", 1)
    run = converse(model, plan, [first, tokens(70)])
    before = held(run.cache), run.cache.get_seq_length()
    if plan == "full":
        run.cache.crop(-2)
        assert run.cache.get_seq_length() == before[1] - 2
        again = converse(model, plan, [tokens(80), tokens(81)], cache=run.cache)
        ids = torch.cat([first["input_ids"][:, :-1], torch.tensor([[80, 81]])], dim=1)
        types = torch.cat([first["mm_token_type_ids"], torch.zeros(1, 1).long()], dim=1)
        whole = {**first, "input_ids": ids, "mm_token_type_ids": types}
        whole["attention_mask"] = torch.ones_like(ids)
        assert error(again.logits, plain_logits(model, whole)[0, -2:]) < TOLERANCE
    else:
        with pytest.raises(PlanError, match="cannot take back"):
            run.cache.crop(-20)
        assert same_held(held(run.cache), before[0])
        assert run.cache.get_seq_length() == before[1]


@pytest.mark.parametrize("plan", ["full", "snapkv:0.4(window=4)", "tova:0.4"])
@pytest.mark.parametrize("family", ["llava", "qwen3-vl"])
def test_assisted_decoding_equals_plain_or_is_refused(family, plan):
    """Guessed tokens are taken back by cropping: exact if nothing is evicted, else an error."""
    model, _ = tiny_model(family)
    inputs = turn(family, 1)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8}
    if plan == "full":
        plain = generate(model, inputs, max_new_tokens=8)
        ours = generate(model, inputs, plan, **options)
        assert torch.equal(ours.sequences, plain.sequences)
    else:
        with pytest.raises(ValueError, match=r"(?i)assisted decoding"):
            generate(model, inputs, plan, **options)


@pytest.mark.parametrize("plan", ["full", "tova:0.4"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_cache_may_be_used_in_any_gradient_mode(plan, mode):
    """What was made in inference mode is continued elsewhere, and the other way round."""
    model, _ = tiny_model("llava")
    parts = [turn("llava", 1), *(tokens(70 + n) for n in range(40))]
    expected = converse(model, plan, parts)
    for first, then in ((torch.inference_mode, mode), (mode, torch.inference_mode)):
        frozen = copy.deepcopy(model).requires_grad_(False)
        with compress(frozen, plan) as run:
            with first():
                output = frozen(**parts[0])
                logits = [output.logits[0]]
            with then():
                for part in parts[1:]:
                    logits.append(frozen(**part, **with_cache(frozen, run.cache)).logits[0])
        assert error(torch.cat(logits), expected.logits) < TOLERANCE
        assert same_held(held(run.cache), expected.held)


def test_a_tuple_is_returned_where_it_is_asked_for():
    model, _ = tiny_model("qwen3-vl")
    inputs = turn("qwen3-vl", 1)
    with as_it_was(model):
        plain = model(**inputs, return_dict=False)
        with compress(model, "full"):
            ours = model(**inputs, return_dict=False)
    assert isinstance(ours, tuple) and len(ours) == len(plain)
    assert error(ours[0], plain[0]) < TOLERANCE
