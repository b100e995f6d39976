"""Positions are those that plain Transformers uses, and leave no trace on the model."""

from __future__ import annotations

import pytest
import torch

from conduit_kv.errors import InputError
from conduit_kv.families import family_of
from tests.families.helpers import reaching_text_model, unpadded
from tests.tiny import MIXED_NAMES, NAMES, VIDEO_NAMES, tiny_inputs, tiny_model

MROPE = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")


def plain_positions(name, inputs, call):
    """``[T_b]`` or ``[3, T_b]`` of each sequence, as they reach the text model."""
    model, _ = tiny_model(name)
    family = family_of(model)
    seen = reaching_text_model(family, model, call, **inputs)["position_ids"]
    masks = inputs["attention_mask"].bool()
    if family.position_axes == 1:
        return [row[mask] for row, mask in zip(seen, masks, strict=True)]
    return [seen[-3:, row, mask] for row, mask in enumerate(masks)]


def check(name, inputs, call):
    model, _ = tiny_model(name)
    found = family_of(model).relative_positions(model, unpadded(inputs), inputs)
    expected = plain_positions(name, inputs, call)
    for mine, plain in zip(found, expected, strict=True):
        assert mine.dtype == torch.long
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_images", [(1,), (0,), (2, 0, 1)])
def test_equal_those_of_generate(name, n_images):
    model, _ = tiny_model(name)
    inputs = tiny_inputs(name, n_images=n_images)

    def generate(**arguments):
        return model.generate(**arguments, max_new_tokens=2, do_sample=False)

    check(name, inputs, generate)


@pytest.mark.parametrize("name", MROPE)
@pytest.mark.parametrize(
    ("n_images", "n_videos"), [((1,), (0,)), ((2, 1), (0, 0)), ((1, 0), (1, 2)), ((0,), (1,))]
)
def test_equal_those_of_forward(name, n_images, n_videos):
    model, _ = tiny_model(name)
    check(name, tiny_inputs(name, n_images=n_images, n_videos=n_videos, frames=8), model)


@pytest.mark.parametrize("name", VIDEO_NAMES)
def test_equal_those_of_generate_with_videos(name):
    model, _ = tiny_model(name)
    images = (1, 0) if name in MIXED_NAMES else (0, 0)
    inputs = tiny_inputs(name, n_images=images, n_videos=(1, 1), frames=6)

    def generate(**arguments):
        return model.generate(**arguments, max_new_tokens=2, do_sample=False)

    check(name, inputs, generate)


def test_fractions_of_seconds_are_truncated_as_in_the_model():
    inputs = tiny_inputs("qwen2.5-vl", n_images=(0, 0), n_videos=(1, 1), frames=8)
    inputs["second_per_grid_ts"] = torch.tensor([0.7, 1 / 3])
    model, _ = tiny_model("qwen2.5-vl")
    check("qwen2.5-vl", inputs, model)
    ids = unpadded(inputs)
    first, _ = family_of(model).relative_positions(model, ids, inputs)
    times = first[0, ids[0] == model.config.video_token_id].unique()
    assert torch.diff(times).tolist() == [1, 1, 2]


@pytest.mark.parametrize("name", MROPE)
def test_a_later_chunk_is_moved_by_an_offset(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    inputs = tiny_inputs(name, n_images=(2,), n_videos=(1,), frames=4)
    (ids,) = unpadded(inputs)
    (whole,) = family.relative_positions(model, [ids], inputs)
    first = torch.nonzero(ids == model.config.image_token_id).flatten()
    end = int(first[:-1][torch.diff(first) > 1][0]) + 2  # behind the first image's closing mark
    later = {key: inputs[key] for key in ("video_grid_thw", "second_per_grid_ts") if key in inputs}
    later["image_grid_thw"] = inputs["image_grid_thw"][1:]
    (chunk,) = family.relative_positions(model, [ids[end:]], later)
    assert int(whole[:, end - 1].min()) == int(whole[:, end - 1].max())  # a text token
    assert torch.equal(whole[:, end:], chunk + whole[:, end - 1].max() + 1)


@pytest.mark.parametrize("name", MROPE)
@pytest.mark.parametrize("before", [None, "untouched"])
def test_no_state_is_left_on_the_model(name, before):
    model, _ = tiny_model(name)
    family = family_of(model)
    inputs = tiny_inputs(name, n_images=(1, 2), n_videos=(1, 0))
    given = {key: value.clone() for key, value in inputs.items()}
    saved = model.model.rope_deltas
    model.model.rope_deltas = before
    try:
        one = family.relative_positions(model, unpadded(inputs), inputs)
        two = family.relative_positions(model, unpadded(inputs), inputs)
        assert model.model.rope_deltas is before
    finally:
        model.model.rope_deltas = saved
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(torch.equal(given[key], inputs[key]) for key in given)


@pytest.mark.parametrize("name", MROPE)
def test_images_that_touch_are_refused(name):
    """``get_rope_index`` would give both the positions of the first."""
    model, _ = tiny_model(name)
    inputs = tiny_inputs(name, n_images=(2,), sizes=[(28, 28)])
    (ids,) = unpadded(inputs)
    image = model.config.image_token_id
    touching = torch.cat([ids[ids != image][:4], ids[ids == image], ids[ids != image][4:]])
    with pytest.raises(InputError, match="vision-start"):
        family_of(model).relative_positions(model, [touching], inputs)


@pytest.mark.parametrize("name", NAMES)
def test_text_counts_from_zero(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    (positions,) = family.relative_positions(model, [torch.tensor([5, 6, 7])], {})
    assert positions.tolist() == [[0, 1, 2]] * 3 if family.position_axes == 3 else [0, 1, 2]
