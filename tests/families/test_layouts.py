"""Each visual token is labelled with its own image, and with its own place in it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from conduit_kv.families import family_of
from conduit_kv.layout import Grid, View
from tests.families.helpers import (
    embeddings,
    layouts,
    newlines,
    unpadded,
    without_vision_attention,
)
from tests.tiny import MIXED_NAMES, NAMES, VIDEO_NAMES, tiny_inputs, tiny_model
from tests.tiny.models import TINY
from tests.tiny.parts import film, picture


def process(name, prompts, images=None, films=None, **options):
    tiny = TINY[name]
    _, processor = tiny_model(name)
    text = [tiny.start + prompt + tiny.end for prompt in prompts]
    arguments = {"text": text, "return_tensors": "pt", "padding": True}
    if images:
        arguments["images"] = [images] if tiny.nested else images
    if films:
        arguments["videos"] = [films] if tiny.nested_videos else films
        metadata = {
            "fps": 2.0,
            "total_num_frames": len(films[0]),
            "frames_indices": list(range(len(films[0]))),
        }
        arguments |= {"video_metadata": [metadata for _ in films], "do_sample_frames": False}
    return processor(**arguments, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_images", [(1,), (3,), (2, 0, 1), (0,), (0, 2)])
def test_counts_equal_the_features_of_the_real_model(name, n_images):
    model, _ = tiny_model(name)
    family = family_of(model)
    inputs = tiny_inputs(name, n_images=n_images)
    found = layouts(family, model, inputs)
    assert [len(layout.grids) for layout in found] == list(n_images)
    for layout in found:
        assert layout.counts() == [grid.tokens for grid in layout.grids]
        for grid, number in zip(layout.grids, range(len(layout.grids)), strict=True):
            mine = layout.image == number
            for axis, size in (
                (layout.frame, grid.frames),
                (layout.row, grid.rows),
                (layout.column, grid.columns),
            ):
                assert int(axis[mine].min()) >= 0 and int(axis[mine].max()) < size
        # No two tokens share a place.
        places = torch.stack([layout.image, layout.frame, layout.row, layout.column])[
            :, layout.visual
        ]
        assert len({tuple(place) for place in places.T.tolist()}) == int(layout.visual.sum())
        for axis in (layout.frame, layout.row, layout.column):
            assert bool((axis[layout.text] == -1).all())
    # The real model accepts the same inputs, so that its features are as many in total.
    embeddings(family, model, inputs)


def test_image_by_image_counts_equal_the_features_of_the_real_model():
    for name in NAMES:
        model, _ = tiny_model(name)
        inputs = tiny_inputs(name, n_images=(3,))
        (layout,) = layouts(family_of(model), model, inputs)
        names = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")
        names = (*names, "pixel_attention_mask")
        given = {key: inputs[key] for key in names if key in inputs}
        with torch.no_grad():
            features = model.model.get_image_features(**given, return_dict=True).pooler_output
        if len(features) == 3:
            assert [len(image) for image in features] == layout.counts(), name
        else:  # tiles, or everything of a sequence together
            assert sum(image.shape[:-1].numel() for image in features) == sum(layout.counts())


@pytest.mark.parametrize("name", NAMES)
def test_another_image_changes_its_own_tokens_only(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    n_images = (2, 0, 1)
    sizes = TINY[name].sizes
    tiny = TINY[name]
    _, processor = tiny_model(name)
    prompts = [
        tiny.start + "Look" + tiny.image + "and " + tiny.image + "What" + tiny.end,
        tiny.start + "Where is the dog" + tiny.end,
        tiny.start + tiny.image + "please" + tiny.end,
    ]
    pictures = [picture(*size, seed=n) for n, size in enumerate(sizes)]

    def run(images):
        nested = [images[:2], [], images[2:]]
        inputs = processor(
            text=prompts,
            images=nested if tiny.nested else images,
            padding=True,
            return_tensors="pt",
        )
        return inputs, embeddings(family, model, inputs)

    inputs, before = run(pictures)
    found = layouts(family, model, inputs)
    assert [len(layout.grids) for layout in found] == list(n_images)
    where = [(0, 0), (0, 1), (2, 0)]
    for number, (row, image) in enumerate(where):
        changed = list(pictures)
        changed[number] = picture(*sizes[number], seed=77)
        _, after = run(changed)
        for other, (a, b) in enumerate(zip(before, after, strict=True)):
            differs = (a - b).abs().amax(-1) > 1e-6
            expected = (found[other].image == image) & ~newlines(model, a)
            if other != row:
                expected = torch.zeros_like(expected)
            assert bool((differs == expected).all())


def _tile_grid(name, size, layout, frame):
    """(rows, columns) of the whole in cells of ``frame``, and where the frame begins in it."""
    mine = layout.frame == frame
    rows = int(layout.row[mine].max()) + 1
    columns = int(layout.column[mine].max()) + 1
    if name != "internvl3" or frame == 0:
        return rows, columns, 0, 0
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    across, down = get_optimal_tiled_canvas(size, (28, 28), 1, 6)
    return (
        rows * down,
        columns * across,
        rows * ((frame - 1) // across),
        columns * ((frame - 1) % across),
    )


GEOMETRY = [
    ("llava", (28, 28)),
    ("llava-full", (28, 28)),
    ("llava-siglip", (28, 28)),
    ("llava-pixtral", (42, 56)),
    ("llava-next", (28, 42)),
    ("llava-next", (42, 28)),
    ("llava-next", (56, 56)),
    ("llava-onevision", (28, 42)),
    ("llava-onevision", (42, 28)),
    ("qwen2-vl", (42, 56)),
    ("qwen2.5-vl", (56, 42)),
    ("qwen3-vl", (28, 70)),
    ("internvl3", (28, 56)),
    ("internvl3", (84, 56)),
    ("smolvlm", (56, 42)),
    ("smolvlm", (28, 56)),
    ("idefics3", (42, 56)),
    ("idefics3", (56, 28)),
]


@pytest.mark.parametrize(("name", "size"), GEOMETRY)
def test_a_token_lies_where_its_pixels_are(name, size):
    real, _ = tiny_model(name)
    model, family = without_vision_attention(real), family_of(real)
    image = np.asarray(picture(*size, seed=3))

    def run(pixels):
        inputs = process(name, ["Look " + TINY[name].image], [Image.fromarray(pixels)])
        return inputs, embeddings(family, model, inputs)[0]

    inputs, before = run(image)
    (layout,) = layouts(family, model, inputs)
    patches = layout.visual & ~newlines(model, before)
    checked = 0
    for frame in range(layout.grids[0].frames):
        cells = patches & (layout.frame == frame)
        if name == "llava-full":  # its class token stands below the patches
            cells &= layout.row < 4
        view = layout.select(torch.nonzero(cells).flatten())
        rows, columns, top, left = _tile_grid(name, size, view, frame)
        for token in torch.nonzero(cells).flatten().tolist():
            row, column = int(layout.row[token]) + top, int(layout.column[token]) + left
            y, x = (row + 0.5) / rows * size[0], (column + 0.5) / columns * size[1]
            reach_y, reach_x = size[0] / rows / 4, size[1] / columns / 4
            window = (
                slice(int(y - reach_y), max(int(y + reach_y), int(y - reach_y) + 1)),
                slice(int(x - reach_x), max(int(x + reach_x), int(x - reach_x) + 1)),
            )
            changed = image.copy()
            changed[window] = np.where(changed[window] < 128, 255, 0)
            _, after = run(changed)
            change = (after - before).norm(dim=-1)
            change[~cells] = 0
            assert int(change.argmax()) == token, (frame, row, column)
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize("name", VIDEO_NAMES)
def test_a_frame_of_a_video_is_where_it_is(name):
    real, _ = tiny_model(name)
    model, family = without_vision_attention(real), family_of(real)
    frames = film(4, 28, 28, seed=1)

    def run(video):
        inputs = process(name, ["Look " + TINY[name].video], films=[video])
        return inputs, embeddings(family, model, inputs)[0]

    inputs, before = run(frames)
    (layout,) = layouts(family, model, inputs)
    together = name not in ("internvl3", "smolvlm")  # there, each frame is an image
    assert len(layout.grids) == (1 if together else 4)
    label = layout.frame if together else layout.image
    count = int(label.max()) + 1
    assert count in (2, 4)  # Qwen sees two frames as one
    for number in range(4):
        changed = frames.copy()
        changed[number] = 255 - changed[number]
        _, after = run(changed)
        differs = (after - before).abs().amax(-1) > 1e-6
        expected = (label == number * count // 4) & ~newlines(model, before)
        assert bool((differs == expected).all())


@pytest.mark.parametrize("name", MIXED_NAMES)
def test_images_and_videos_come_in_order_of_appearance(name):
    model, _ = tiny_model(name)
    family = family_of(model)
    tiny = TINY[name]
    body = "Look" + tiny.video + "and " + tiny.image + "What is this" + tiny.video
    videos = [film(4, 28, 28, seed=1), film(4, 28, 28, seed=2)]

    def run(films, seed=0):
        inputs = process(name, [body], [picture(42, 28, seed=seed)], films)
        return inputs, embeddings(family, model, inputs)[0]

    inputs, before = run(videos)
    (layout,) = layouts(family, model, inputs)
    if name == "internvl3":
        assert len(layout.grids) == 9
        owner = torch.where(layout.image < 4, 0, torch.where(layout.image == 4, 1, 2))
        owner[layout.text] = -1
    else:
        assert len(layout.grids) == 3
        owner = layout.image
    changes = [([film(4, 28, 28, seed=9), videos[1]], 0), (videos, 5)]
    changes.append(([videos[0], film(4, 28, 28, seed=9)], 0))
    for number, (films, seed) in enumerate(changes):
        _, after = run(films, seed)
        differs = (after - before).abs().amax(-1) > 1e-6
        assert bool((differs == ((owner == number) & ~newlines(model, before))).all())


def test_lone_images_of_a_flat_list_are_tiled_in_onevision():
    model, processor = tiny_model("llava-onevision")
    pictures = [picture(28, 42), picture(56, 28)]
    inputs = processor(
        text="Look <image> and <image>", images=pictures, return_tensors="pt", padding=True
    )
    (layout,) = layouts(family_of(model), model, inputs)
    assert [grid.frames for grid in layout.grids] == [2, 2]
    embeddings(family_of(model), model, inputs)
    del inputs["batch_num_images"]
    assert layouts(family_of(model), model, inputs)[0].grids == layout.grids


def test_many_tiles_are_shrunk_in_onevision():
    model, _ = tiny_model("llava-onevision")
    inputs = tiny_inputs("llava-onevision", sizes=[(56, 56)])
    (layout,) = layouts(family_of(model), model, inputs)
    assert layout.counts() == [4 * 4 + 5 * 6]
    embeddings(family_of(model), model, inputs)


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_without_splitting_an_image_is_one_view(name):
    model, _ = tiny_model(name)
    inputs = tiny_inputs(name, n_images=(2, 1), images_kwargs={"do_image_splitting": False})
    found = layouts(family_of(model), model, inputs)
    assert [layout.grids for layout in found] == [(Grid(1, 2, 2),) * 2, (Grid(1, 2, 2),)]


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_marks_between_tiles_are_text(name):
    model, _ = tiny_model(name)
    inputs = tiny_inputs(name, sizes=[(56, 56)])
    (layout,) = layouts(family_of(model), model, inputs)
    runs = Counter(torch.diff(layout.visual.int()).tolist())
    assert runs[1] == runs[-1] == 5  # four tiles and the view of the whole
    whole = layout.frame[layout.visual] == 0
    assert bool(whole[-4:].all()) and not bool(whole[:-4].any())


@pytest.mark.parametrize("name", ["llava", "llava-full", "llava-siglip", "internvl3"])
def test_grids_without_pixels_follow_the_configuration(name):
    """Features computed before: the pixels are not among the inputs."""
    model, _ = tiny_model(name)
    inputs = tiny_inputs(name, n_images=(2,))
    family, ids = family_of(model), unpadded(inputs)
    assert family.grids(model, ids, {}) == family.grids(model, ids, inputs)


def test_a_configured_sequence_length_is_not_trusted():
    model, _ = tiny_model("llava")
    assert model.config.image_seq_length == 576  # the default, which is not this model's
    (layout,) = layouts(family_of(model), model, tiny_inputs("llava"))
    assert layout.counts() == [16]


@pytest.mark.parametrize("name", NAMES)
def test_decoding_brings_no_images(name):
    """``generate`` passes sizes and grids on while it decodes, but neither pixels nor images."""
    model, _ = tiny_model(name)
    inputs = tiny_inputs(name)
    kept = {key: value for key, value in inputs.items() if "pixel" not in key}
    step = torch.tensor([[5]])
    (layout,) = family_of(model).layouts(model, list(step), kept)
    assert len(layout) == 1 and not layout.grids


def test_view_in_tiles():
    view = View(1, 2, 4, 0, 1, 2)
    assert view.cells()[1:].T.tolist() == [
        [0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]
    ]  # fmt: skip
    tall = View(0, 4, 2, 1, 2, 1)
    assert tall.cells().T.tolist()[:4] == [[0, 1, 0], [0, 2, 0], [0, 1, 1], [0, 2, 1]]
