"""The adapters' small questions: which family, which layers, which errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from conduit_kv.errors import InputError, ModelError
from conduit_kv.families import FAMILIES, family_of
from tests.families.helpers import reaching_text_model, unpadded
from tests.tiny import FAMILY_NAMES, MIXED_NAMES, NAMES, tiny_inputs, tiny_model
from tests.tiny.models import TINY, build


def test_every_family_has_a_tiny_model():
    found = [family_of(tiny_model(name)[0]) for name in FAMILY_NAMES]
    assert found == list(FAMILIES)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_families_know_how_their_processor_takes_images():
    for name in FAMILY_NAMES:
        family = family_of(tiny_model(name)[0])
        assert family.nested_images == TINY[name].nested, name
        needs = "video_processor" in tiny_model(name)[1].get_attributes()
        assert family.needs_torchvision == needs, name


def test_an_unknown_model_names_the_families():
    model = SimpleNamespace(config=SimpleNamespace(model_type="bert"))
    with pytest.raises(ModelError, match=r"'bert'") as caught:
        family_of(model)
    for family in FAMILIES:
        assert family.name in str(caught.value)
    assert "docs/families.md" in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_model(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    text = family.text_model(model)
    layers = family.layers(text)
    assert len(layers) == 4
    for layer in layers:
        attention = family.attention(layer)
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert isinstance(getattr(attention, part), nn.Linear)
    assert callable(text.rotary_emb) and callable(text.norm)


@pytest.mark.parametrize("name", NAMES)
def test_kinds_of_layers(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    text = family.text_model(model)
    kinds = [family.layer_kind(text, layer) for layer in range(4)]
    expected = {
        "llava-next-sliding": ["sliding"] * 4,
        "qwen2.5-vl-sliding": ["full", "full", "sliding", "sliding"],
    }
    assert kinds == expected.get(name, ["full"] * 4)


def test_layers_that_are_no_causal_attention():
    family = FAMILIES[0]
    layer = SimpleNamespace(self_attn=SimpleNamespace(is_causal=True))
    kinds = ["linear_attention", "chunked_attention", "full_attention", "sliding_attention"]
    text = SimpleNamespace(
        config=SimpleNamespace(layer_types=kinds, num_hidden_layers=4), layers=[layer] * 4
    )
    found = [family.layer_kind(text, number) for number in range(4)]
    assert found == ["other", "other", "full", "sliding"]
    both_ways = SimpleNamespace(self_attn=SimpleNamespace(is_causal=False))
    text = SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=2), layers=[both_ways, SimpleNamespace()]
    )
    assert [family.layer_kind(text, number) for number in range(2)] == ["other", "other"]


@pytest.mark.parametrize("name", NAMES)
def test_too_few_and_too_many_images_are_refused(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    three = tiny_inputs(name, n_images=(3,), sizes=[(28, 28)])
    two = tiny_inputs(name, n_images=(2,), sizes=[(28, 28)])
    tokens = int(family.visual_mask(model, two["input_ids"]).sum())
    for ids, inputs in ((unpadded(two), three), (unpadded(three), two)):
        with pytest.raises(InputError) as caught:
            family.layouts(model, ids, inputs)
        wanted = int(family.visual_mask(model, ids[0]).sum())
        assert str(wanted) in str(caught.value)
    assert tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_placeholders_without_images_are_refused(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    ids = torch.tensor([7, model.config.image_token_id, 8])
    with pytest.raises(InputError):
        family.layouts(model, [ids], {})


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_image_is_refused(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    inputs = tiny_inputs(name)
    (ids,) = unpadded(inputs)
    first = int(torch.nonzero(family.visual_mask(model, ids))[0])
    cut = torch.cat([ids[:first], ids[first + 1 :]])
    with pytest.raises(InputError):
        family.layouts(model, [cut], inputs)


@pytest.mark.parametrize("name", sorted({*MIXED_NAMES} - {"internvl3"}))
def test_an_image_in_the_place_of_a_video_is_refused(name):
    model, _ = tiny_model(name)
    video = model.config.video_token_id
    inputs = tiny_inputs(name)
    ids = torch.where(
        inputs["input_ids"][0] == model.config.image_token_id, video, inputs["input_ids"][0]
    )
    with pytest.raises(InputError, match=r"video|image"):
        family_of(model).layouts(model, [ids], inputs)


@pytest.mark.parametrize("n_images", [(1,), (2, 0)])
def test_deepstack_by_hand_is_the_plain_model(n_images):
    """Qwen3-VL's layers, one by one, with the adapter's step after each."""
    model, _ = tiny_model("qwen3-vl")
    family = family_of(model)
    text = family.text_model(model)
    inputs = tiny_inputs("qwen3-vl", n_images=n_images)
    seen = reaching_text_model(family, model, model, **inputs)
    assert len(seen["deepstack_visual_embeds"]) == 2
    with torch.no_grad():
        expected = text(**seen).last_hidden_state
        hidden = seen["inputs_embeds"]
        embeddings = text.rotary_emb(hidden, seen["position_ids"][-3:])
        keep = inputs["attention_mask"].bool()
        length = hidden.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (causal & keep[:, None, :])[:, None] | torch.eye(length, dtype=torch.bool)
        for number, layer in enumerate(family.layers(text)):
            hidden = layer(hidden, attention_mask=mask, position_embeddings=embeddings)
            hidden = family.after_layer(text, number, hidden, seen)
        found = text.norm(hidden)
    torch.testing.assert_close(found[keep], expected[keep], atol=1e-5, rtol=0)


def test_nothing_is_added_without_deepstack_features():
    model, _ = tiny_model("qwen3-vl")
    family = family_of(model)
    hidden = torch.randn(1, 3, 64)
    for features in ({}, {"deepstack_visual_embeds": None, "visual_pos_masks": None}):
        assert family.after_layer(family.text_model(model), 0, hidden, features) is hidden


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models_are_the_same_every_time(name):
    state = torch.random.get_rng_state()
    again, _ = build(TINY[name])
    assert torch.equal(torch.random.get_rng_state(), state)
    model, processor = tiny_model(name)
    for (key, one), (_, two) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(one, two), key
    assert not model.training and model.dtype == torch.float32
    assert processor.tokenizer.padding_side == "left"


@pytest.mark.parametrize("name", NAMES)
def test_tiny_models_prefer_no_special_token(name):
    """Placeholders and the end of a text never come out of greedy decoding."""
    model, processor = tiny_model(name)
    inputs = tiny_inputs(name)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(new) == 8
    assert not set(new) & set(processor.tokenizer.all_special_ids)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_chat_templates_make_the_same_prompt(name):
    _, processor = tiny_model(name)
    content = [{"type": "image"}, {"type": "text", "text": "Where is the dog"}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    tiny = TINY[name]
    assert tiny.image.strip() in prompt
    assert prompt.rstrip().endswith(tiny.end.strip().rpartition("\n")[2])
