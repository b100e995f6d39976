"""What a user may ask for works, or is one clear error: never accepted and then not applied."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from conduit_kv import VLM, InputError, ModelError, PlanError, compress
from conduit_kv.families import family_of
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

PLAN = "snapkv:0.4(window=4)"


@pytest.fixture
def llava():
    """The model and inputs of one prompt; the model must be as before."""
    model, _ = tiny_model("llava")
    plain_logits(model, turn("llava", 1))  # Transformers installs hooks of its own now
    before = fingerprint(model)
    with torch.inference_mode():
        yield model, turn("llava", 1)
    assert fingerprint(model) == before


def refused(model, match, kind=PlanError, plan=PLAN, **arguments):
    with pytest.raises(kind, match=match), compress(model, plan):
        model(**arguments)


@pytest.mark.parametrize("plan", ["full", PLAN])
def test_arguments_that_leave_nothing_to_work_on(llava, plan):
    model, inputs = llava
    refused(model, "use_cache", plan=plan, **inputs, use_cache=False)
    refused(model, "output_attentions", plan=plan, **inputs, output_attentions=True)
    refused(model, "output_hidden_states", plan=plan, **inputs, output_hidden_states=[1])
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    refused(model, "input_ids", plan=plan, inputs_embeds=embeds)
    square = torch.ones(1, 1, *[inputs["input_ids"].shape[1]] * 2, dtype=torch.bool)
    refused(model, "2-d attention_mask", plan=plan, **inputs | {"attention_mask": square})
    with pytest.raises(PlanError, match="by name"), compress(model, plan):
        model(inputs["input_ids"], inputs["pixel_values"])


def test_ids_alone_may_be_positional(llava):
    model, _ = llava
    ids = torch.tensor([[60, 61, 62]])
    with compress(model, "full"):
        found = model(ids).logits
    assert error(found, model(ids).logits) < TOLERANCE


def test_settings_of_generate_that_leave_nothing_to_work_on(llava):
    model, inputs = llava
    model = copy.deepcopy(model)  # Transformers notes a static cache's length on it
    for options, match in (
        ({"use_cache": False}, "use_cache"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"cache_implementation": "quantized"}, "Cache"),
        ({"cache_implementation": "offloaded"}, "DynamicCache"),
    ):
        said = pytest.raises((PlanError, ImportError), match=f"{match}|quanto|hqq")
        with said, compress(model, PLAN):
            model.generate(**inputs, max_new_tokens=2, **options)


def test_caches_of_the_caller(llava):
    model, inputs = llava
    empty, full = DynamicCache(), DynamicCache()
    model(**tokens(60, 61), **with_cache(model, full))
    refused(model, "DynamicCache", **tokens(62), **with_cache(model, full))
    with compress(model, PLAN) as run:
        output = model(**inputs, **with_cache(model, empty))
        assert output.past_key_values is run.cache
    foreign = converse(model, "tova:0.4", [inputs]).cache
    refused(model, r"made under tova:0\.4", **tokens(62), **with_cache(model, foreign))


def test_a_mask_or_batch_that_does_not_fit_the_cache(llava):
    model, inputs = llava
    cache = converse(model, PLAN, [inputs]).cache
    wide = torch.ones(1, 7, dtype=torch.long)
    refused(model, "columns", InputError, **tokens(62), attention_mask=wide,
            **with_cache(model, cache))  # fmt: skip
    two = {"input_ids": torch.tensor([[62], [63]])}
    refused(model, "1 sequences and the call brings 2", InputError, **two,
            **with_cache(model, cache))  # fmt: skip
    nothing = inputs["attention_mask"] * 0
    refused(model, "no token", InputError, **inputs | {"attention_mask": nothing})
    assert len(converse(model, PLAN, [tokens(70)], cache=cache).logits) == 1


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_custom_positions_are_refused_and_the_own_ones_are_not(family):
    model, _ = tiny_model(family)
    inputs = turn(family, 1)
    with as_it_was(model):
        expected = model(**inputs).logits
        own = converse(model, "full", [inputs]).cache.progress.position_ids(0)[:, None]
        positions = own if own.shape[0] == 3 else own[0]
        with compress(model, "full"):
            found = model(**inputs, position_ids=positions).logits
            assert error(found, expected) < TOLERANCE
            with pytest.raises(PlanError, match="position_ids"):
                model(**inputs, position_ids=positions + 1)
            with pytest.raises(PlanError, match="position_ids"):
                model(**inputs, position_ids=positions[..., :-1])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_images_and_placeholders_must_agree(family):
    model, _ = tiny_model(family)
    one, two = (turn(family, count, sizes=[(28, 28)]) for count in (1, 2))
    text = {"input_ids", "attention_mask", "mm_token_type_ids"}
    mixed = [
        {
            **{k: v for k, v in a.items() if k in text},
            **{k: v for k, v in b.items() if k not in text},
        }
        for a, b in ((one, two), (two, one))
    ]
    for inputs in mixed:
        with torch.inference_mode(), compress(model, PLAN) as run:
            with pytest.raises(InputError, match="placeholder"):
                model(**inputs)
            assert run.cache is None
            model(**one)
            assert run.cache.get_seq_length() == one["input_ids"].shape[1]


def test_images_that_are_missing_altogether(llava):
    model, inputs = llava
    refused(
        model, "placeholder", InputError, **{k: v for k, v in inputs.items() if "pixel" not in k}
    )
    text = tokens(60, 61, 62)
    refused(model, "placeholder", InputError, **text, pixel_values=inputs["pixel_values"])


def test_a_session_counts_images():
    vlm = VLM(*tiny_model("llava"))
    inputs = vlm.render([{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}])
    with pytest.raises(InputError, match="1 image"):
        vlm.prefill(vlm.process(inputs, [picture(28, 28)]))


# -- kinds of models -------------------------------------------------------------------------------


def test_compiled_models_are_refused():
    model, processor = tiny_model("llava")
    wrapped = torch.compile(model, backend="eager")
    with pytest.raises(PlanError, match="compile"), compress(wrapped, PLAN):
        pass
    with pytest.raises(PlanError, match="compile"):
        VLM(wrapped, processor)
    for part in ("", "model", "model.language_model"):
        inside = copy.deepcopy(model)
        inside.get_submodule(part).compile(backend="eager")
        with pytest.raises(PlanError, match="compile"), compress(inside, PLAN):
            pass
    inside = copy.deepcopy(model)
    inside.forward = torch.compile(inside.forward, backend="eager")
    with pytest.raises(PlanError, match="compile"), compress(inside, PLAN):
        pass


def test_models_of_no_family_are_refused():
    model, _ = tiny_model("llava")
    with pytest.raises(ModelError, match="no adapter"), compress(model.model.language_model, PLAN):
        pass


def test_plans_are_read_before_anything_is_wrapped():
    model, _ = tiny_model("llava")
    before = fingerprint(model)
    for plan in ("snapkv", "snapkv:0", "snapkv:1.7", "snapkv:0.2 + tova:0.2", "no-such:0.2", ""):
        with pytest.raises(PlanError), compress(model, plan):
            pass
    assert fingerprint(model) == before


@pytest.mark.parametrize("family", ["llava", "qwen3-vl"])
def test_a_model_wrapped_by_peft(family):
    peft = pytest.importorskip("peft")
    model = copy.deepcopy(tiny_model(family)[0])
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    inputs, base = turn(family, 1), plain_logits(tiny_model(family)[0], turn(family, 1))
    plain_logits(model, inputs)
    before = fingerprint(model)
    with as_it_was(model):
        expected = adapted(**inputs).logits
        answer = adapted.generate(**inputs, max_new_tokens=4, do_sample=False)
        with compress(adapted, "snapkv:1.0"):
            found = adapted(**inputs).logits
            again = adapted.generate(**inputs, max_new_tokens=4, do_sample=False)
        with compress(adapted, "tova:0.4") as run:
            adapted.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert error(expected, base) > 0.01  # the adapter does something
    assert error(found, expected) < TOLERANCE and torch.equal(again, answer)
    assert len(held(run.cache)[0][0]) < run.cache.get_seq_length()
    assert fingerprint(model) == before
    assert VLM(adapted, tiny_model(family)[1]).model is model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llava", "qwen3-vl"])
def test_half_precision(family, dtype):
    """The identity is within the dtype's rounding of the plain model; what is held is half."""
    model = copy.deepcopy(tiny_model(family)[0]).to(dtype)
    inputs = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in turn(family, 1).items()
    }
    expected = plain_logits(model, inputs)[0].float()
    identity = converse(model, "full", [inputs])
    assert identity.logits.dtype == dtype
    assert error(identity.logits.float(), expected) < 8 * torch.finfo(dtype).eps
    run = converse(model, "tgv-kv:0.4", [inputs, tokens(70), turn(family, 0, first=False)])
    assert torch.isfinite(run.logits).all()
    assert run.cache.layers[0].tail.keys.dtype == dtype


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_attention_of_the_model_is_put_back(implementation):
    model = copy.deepcopy(tiny_model("qwen2.5-vl")[0])
    model.set_attn_implementation(implementation)
    inputs = turn("qwen2.5-vl", 1)
    expected = plain_logits(model, inputs)
    with torch.inference_mode(), compress(model, "full"):
        assert error(model(**inputs).logits, expected) < TOLERANCE
    assert model.config.text_config._attn_implementation == implementation
    assert torch.equal(plain_logits(model, inputs), expected)


def test_a_report_needs_a_request(llava):
    model, inputs = llava
    with compress(model, PLAN) as run:
        with pytest.raises(InputError, match="nothing has run"):
            _ = run.report
        model(**inputs)
        assert run.report.plan == str(run.plan)
    assert run.report.sequences[0].tokens == inputs["input_ids"].shape[1]


def test_a_layer_of_another_kind_is_named(llava):
    """Every layer of this model has a window: nothing is evicted, and the report says why."""
    model, _ = tiny_model("llava-next-sliding")
    run = converse(model, "tgv-kv:0.2", [turn("llava-next-sliding", 1), tokens(70)])
    seen = run.cache.get_seq_length()
    assert all(len(head) == seen for heads in run.held for head in heads)
    assert any("nothing evicted" in note for note in run.notes)
    assert any("layers [0, 1, 2, 3]" in note for note in run.notes)
    family = family_of(model)
    kinds = {family.layer_kind(family.text_model(model), layer) for layer in range(4)}
    assert kinds == {"sliding"}


def test_a_cache_is_refused_by_the_plain_model(llava):
    """A plain layer attends to what the cache returns, which is the new tokens alone."""
    model, inputs = llava
    for plan in ("full", PLAN):
        cache = converse(model, plan, [inputs, tokens(70)]).cache
        before = held(cache)
        with pytest.raises(PlanError, match="only under it"):
            model(**tokens(71), **with_cache(model, cache))
        with pytest.raises(PlanError, match="only under it"):
            ids = torch.cat([inputs["input_ids"], torch.tensor([[70, 71]])], dim=1)
            model.generate(input_ids=ids, max_new_tokens=1, **with_cache(model, cache))
        assert held(cache)[0][0].tolist() == before[0][0].tolist()
        expected = converse(model, plan, [inputs, tokens(70), tokens(71)]).logits[-1:]
        assert torch.equal(converse(model, plan, [tokens(71)], cache=cache).logits, expected)


@pytest.mark.parametrize("plan", ["full", "tova:0.4", "ada-kv:0.4(window=4)"])
def test_a_copied_cache_goes_its_own_way(llava, plan):
    """``copy.deepcopy``, as Transformers' documentation has it for a prompt that is used again."""
    model, inputs = llava
    run = converse(model, plan, [inputs, tokens(70)])
    twin = copy.deepcopy(run.cache)
    converse(model, plan, [tokens(80), turn("llava", 1, first=False)], cache=twin)
    expected = converse(model, plan, [inputs, tokens(70), tokens(71), tokens(72)])
    again = converse(model, plan, [tokens(71), tokens(72)], cache=run.cache)
    assert torch.equal(again.logits, expected.logits[-2:])
    assert same_held(again.held, expected.held)


def test_gradient_checkpointing_is_refused():
    model = copy.deepcopy(tiny_model("llava")[0])
    model.gradient_checkpointing_enable()
    inputs = turn("llava", 1)
    with compress(model, "full"):
        found = model(**inputs).logits  # in evaluation it does nothing
    assert error(found, plain_logits(tiny_model("llava")[0], inputs)) < TOLERANCE
    model.train()
    with pytest.raises(PlanError, match="gradient_checkpointing_disable"), compress(model, "full"):
        model(**inputs)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_padding_on_the_right(family):
    """Rows of padding mean nothing; the others are what they are without it."""
    model, _ = tiny_model(family)
    inputs = turn(family, 1)
    ids = inputs["input_ids"]
    padded = {**inputs, "input_ids": torch.cat([ids, ids[:, :3] * 0 + 60], dim=1)}
    padded["attention_mask"] = torch.cat([ids * 0 + 1, ids[:, :3] * 0], dim=1)
    if "mm_token_type_ids" in inputs:
        types = inputs["mm_token_type_ids"]
        padded["mm_token_type_ids"] = torch.cat([types, types[:, :3] * 0], dim=1)
    expected = converse(model, "tgv-kv:0.4", [inputs])
    with torch.inference_mode(), compress(model, "tgv-kv:0.4") as run:
        found = model(**padded).logits[0, : ids.shape[1]]
    assert error(found, expected.logits) < TOLERANCE
    assert same_held(held(run.cache), expected.held)
    hole = torch.ones_like(ids)
    hole[:, 3] = 0
    refused(model, "between others", InputError, **inputs | {"attention_mask": hole})


def test_a_model_whose_weights_are_moved_by_accelerate():
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(tiny_model("qwen3-vl")[0])
    inputs = turn("qwen3-vl", 1)
    expected = converse(model, "tova:0.4", [inputs, tokens(70)])
    accelerate.cpu_offload(model, execution_device="cpu")
    before = {name: vars(module).get("forward") for name, module in model.named_modules()}
    moved = converse(model, "tova:0.4", [inputs, tokens(70)])
    assert error(moved.logits, expected.logits) < TOLERANCE
    assert same_held(moved.held, expected.held)
    assert before == {name: vars(part).get("forward") for name, part in model.named_modules()}
