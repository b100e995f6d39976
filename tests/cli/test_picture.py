"""What the picture shows, by its pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import InputError
from conduit_kv.layout import Grid, Layout, View
from conduit_kv.picture import Retention, _bits_block, draw_retention
from conduit_kv.stages.flow import GONE, RUNS, WAITS
from conduit_kv.stages.hold import average_bits
from tests.tiny import tiny_inputs, tiny_model


def layout_of(*grids: Grid, text: int = 3) -> Layout:
    layout = Layout.text_only(text)
    for grid in grids:
        layout = layout.extend(Layout.of(torch.ones(grid.tokens, dtype=torch.bool), [grid]))
        layout = layout.extend(Layout.text_only(text))
    return layout


def retention(layers: int = 2, size: int = 4) -> Retention:
    """The upper left quarter of the image is kept in all layers, and all text."""
    layout = layout_of(Grid(1, size, size))
    kept = layout.text | ((layout.row < size // 2) & (layout.column < size // 2))
    held = np.repeat(kept.numpy()[None].astype(np.float32), layers, 0)
    return Retention("tgv-kv:0.5", layout, held)


def test_of_a_cache() -> None:
    vlm = VLM(*tiny_model("llava"))
    state = vlm.prefill(tiny_inputs("llava"), "ada-kv:0.5")
    found = Retention.of(state.cache)
    sequence = state.report.sequences[0]
    assert found.plan == "ada-kv:0.5"
    assert found.held.shape == (4, sequence.tokens)
    assert found.kept() == pytest.approx(sequence.kept)
    assert found.kept(0) == pytest.approx(sequence.kept_visual)
    assert set(np.unique(found.held)) <= {0.0, 0.5, 1.0}


def test_map() -> None:
    share = retention().map(0)
    assert share.shape == (4, 4)
    assert (share[:2, :2] == 1).all()
    assert share.sum() == 4


def test_map_takes_the_frame_that_is_held_most() -> None:
    """An overview of one token over tiles of four."""
    grid = Grid(2, 2, 2, (View(0, 1, 1), View(1, 2, 2)))
    layout = layout_of(grid, text=0)
    held = np.zeros((1, 5), dtype=np.float32)
    held[0, 2] = 1
    assert Retention("x", layout, held).map(0).tolist() == [[0, 1], [0, 0]]
    held[0, 0] = 1
    assert (Retention("x", layout, held).map(0) == 1).all()


def light(picture: Image.Image, x: int, y: int) -> int:
    return sum(picture.convert("RGB").getpixel((x, y)))  # type: ignore[arg-type]


def test_panels_are_dark_where_tokens_are_gone(tmp_path: Path) -> None:
    path = draw_retention(retention(), [Image.new("RGB", (60, 60), "white")], tmp_path / "a.png")
    with Image.open(path) as picture:
        # The first panel begins at (24, 78) and is 150 pixels wide.
        assert light(picture, 24 + 30, 78 + 30) == 3 * 255
        for x, y in ((120, 30), (30, 120), (120, 120)):
            assert light(picture, 24 + x, 78 + y) < 250


def test_what_half_of_the_layers_keep_lies_between(tmp_path: Path) -> None:
    kept = retention(layers=24)
    kept.held[1::2, kept.layout.visual.numpy()] = 0
    path = draw_retention(kept, [Image.new("RGB", (60, 60), "white")], tmp_path / "a.png")
    with Image.open(path) as picture:
        assert 250 < light(picture, 24 + 30, 78 + 30) < 700


def test_several_images_and_several_plans(tmp_path: Path) -> None:
    layout = layout_of(Grid(1, 4, 4), Grid(1, 2, 8))
    held = np.ones((30, len(layout)), dtype=np.float32)
    two = Retention("full", layout, held)
    images = [Image.new("RGB", (60, 60), "red"), Image.new("L", (160, 40), 255)]
    one = draw_retention(two, images, tmp_path / "one.png")
    more = draw_retention([two, two], images, tmp_path / "more.webp")
    with Image.open(one) as a, Image.open(more) as b:
        assert a.width == b.width
        assert b.height > 1.5 * a.height


def test_missing_images_are_grey_and_long_sequences_fit(tmp_path: Path) -> None:
    layout = layout_of(*[Grid(1, 16, 16)] * 8)
    held = np.zeros((4, len(layout)), dtype=np.float32)
    path = draw_retention(Retention("x", layout, held), [], tmp_path / "a.jpg")
    with Image.open(path) as picture:
        assert picture.width < 1200


def test_centre_crop(tmp_path: Path) -> None:
    """A model that sees the middle only: what it never saw is not drawn."""
    wide = Image.new("RGB", (120, 40), "white")
    wide.paste("blue", (0, 0, 40, 40))
    kept = retention()
    kept.held[:] = 1
    path = draw_retention(kept, [wide], tmp_path / "a.png", center_crop=True)
    with Image.open(path) as picture:
        assert light(picture, 24 + 5, 78 + 75) == 3 * 255


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        draw_retention(retention(), [], tmp_path / "missing" / "a.png")
    with pytest.raises(InputError, match="cannot be written"):
        draw_retention(retention(), [], tmp_path / "a.nothing")
    with pytest.raises(InputError, match="nothing to draw"):
        draw_retention([], [], tmp_path / "a.png")


def test_stages_of_the_prompt() -> None:
    """What ran, waited and was gone, as the layers' caches have it."""
    vlm = VLM(*tiny_model("llava"))
    inputs = tiny_inputs("llava", (2,))
    for plan, others in {"reroute:0.5": WAITS, "pdrop:0.6": GONE, "tome:0.5": GONE}.items():
        state = vlm.prefill(inputs, plan)
        found = Retention.of(state.cache)
        assert found.ran is not None
        for layer in range(4):
            assert np.flatnonzero(found.ran[layer] == RUNS).tolist() == (
                state.cache.held(layer).tolist()
            )
            assert set(np.unique(found.ran[layer])) <= {RUNS, others}
        assert [stage.start for stage in found.stages()] == (
            [0] if plan == "tome:0.5" else [0, *state.cache.flows[0].schedules[0].layers]
        )
    assert Retention.of(vlm.prefill(inputs, "tgv-kv:0.5").cache).stages() == []


def test_what_came_back_is_green(tmp_path: Path) -> None:
    base = retention(3)
    ran = np.full(base.held.shape, RUNS)
    visual = np.flatnonzero(base.layout.visual.numpy())
    ran[1, visual] = WAITS
    ran[1, visual[0]] = GONE
    ran[2, visual[0]] = GONE
    ran[2, visual[1:8]] = WAITS
    white = Image.new("RGB", (64, 64), "white")
    files = [tmp_path / "plain.png", tmp_path / "stages.png"]
    draw_retention(base, [white], files[0])
    draw_retention(Retention("x", base.layout, base.held, ran), [white], files[1])
    plain, staged = (np.asarray(Image.open(file)).astype(int) for file in files)
    assert staged.shape[0] > plain.shape[0]
    greens = [
        int(((p[..., 1] > p[..., 0] + 60) & (p[..., 1] > p[..., 2] + 40)).sum())
        for p in (plain, staged)
    ]
    assert greens[0] == 0
    assert abs(greens[1] / 150**2 - 8 / 16) < 0.02  # one panel is 150 pixels wide


def test_bits_of_windows(tmp_path: Path) -> None:
    """Rows that hold more bits are the brighter ones, and their mean is the report's."""
    vlm = VLM(*tiny_model("llava"))
    state = vlm.prefill(tiny_inputs("llava"), "windowquant:3(tolerance=0)")
    found = Retention.of(state.cache)
    assert found.bits is not None
    visual = found.layout.visual.numpy()
    assert (found.bits[:, ~visual] == 16).all()
    assert found.bits[:, visual].mean() == pytest.approx(average_bits(state.cache))
    light = Image.new("RGB", (56, 56), (255, 255, 255))
    block = _bits_block(found, 0, light)
    rows = found.cells(0, found.bits.mean(0)).mean(1)
    assert len(set(rows.tolist())) > 1
    pixels = np.asarray(block.convert("L"), dtype=float)[34:176, 28:170]
    shown = np.array([part.mean() for part in np.array_split(pixels, len(rows))])
    assert shown[rows == rows.max()].min() > shown[rows == rows.min()].max() + 10
    assert Retention.of(vlm.prefill(tiny_inputs("llava"), "full").cache).bits is None
    draw_retention(state.cache, [light], tmp_path / "bits.png")
