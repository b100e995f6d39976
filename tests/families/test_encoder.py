"""How much an image encoder looked at each visual token, against Transformers' own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conduit_kv import compress
from conduit_kv.families import family_of
from conduit_kv.methods.reduce import VisionZip
from tests.contracts.helpers import as_it_was, batch_and_singles, fingerprint, turn
from tests.tiny import tiny_inputs, tiny_model

WITH_CLASS_TOKEN = ("llava", "llava-next", "internvl3")
WITHOUT = ("llava-onevision", "idefics3", "smolvlm")
BLIND = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Tensor]]:
    """What VisionZip is shown: per image, :class:`Looked` and its places in the view."""
    found: list[tuple[Any, Tensor]] = []
    pick = VisionZip.pick

    def look(self: VisionZip, view: Any, places: Tensor, count: int) -> Any:
        found.append((view.looked_at, places))
        return pick(self, view, places, count)

    monkeypatch.setattr(VisionZip, "pick", look)
    return found


def weights(model: Any, name: str, inputs: Any) -> Tensor:
    """``[tiles, P]`` of Transformers' eager attention: what each patch receives."""
    family = family_of(model)
    tower: Any = family.tower(model)
    heard: list[Tensor] = []

    def listen(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        heard.append(output[1])

    place = getattr(model.config, "vision_feature_layer", -1)
    attentions = [m for m in tower.modules() if hasattr(m, "q_proj")]
    before = tower.config._attn_implementation
    tower.set_attn_implementation("eager")
    handle = attentions[place].register_forward_hook(listen, with_kwargs=True)
    try:
        with torch.inference_mode(), as_it_was(model):
            model(**inputs)
    finally:
        handle.remove()
        tower.set_attn_implementation(before)
    (found,) = heard
    mean = found.mean(1)
    received = mean[:, 0] if name in WITH_CLASS_TOKEN else mean.mean(1)
    left_out = getattr(model.config, "vision_feature_select_strategy", "full") == "default"
    return received[:, 1:] if left_out else received


def by_cell(received: Tensor, side: int, row: int, column: int, tile: int, fold: int) -> float:
    """Mean of the patches that make one token of a tile."""
    grid = received[tile].view(side, side)
    block = grid[row * fold : (row + 1) * fold, column * fold : (column + 1) * fold]
    return float(block.mean())


@pytest.mark.parametrize("name", ["llava", "internvl3"])
def test_tokens_get_what_their_patches_received(name: str, seen: list[Any]) -> None:
    """Of every tile in turn, token by token in reading order; the class token's own is left out."""
    model, processor = tiny_model(name)
    inputs = turn(name, 2)
    with torch.inference_mode(), compress(model, "visionzip:0.5", processor=processor):
        model(**inputs)
    received = weights(model, name, inputs)
    fold = 1 if name == "llava" else 2
    side = round(received.shape[1] ** 0.5)
    expected = [
        by_cell(received, side, row, column, tile, fold)
        for tile in range(len(received))
        for row in range(side // fold)
        for column in range(side // fold)
    ]
    found = torch.cat([looked.scores[places] for looked, places in seen])
    assert torch.allclose(found, torch.tensor(expected), atol=1e-6)
    assert all(looked.by == "attention of the class token" for looked, _ in seen)


@pytest.mark.parametrize("name", ["llava-next", "llava-onevision"])
def test_tiles_are_laid_together_and_cut_as_their_features_are(name: str, seen: list[Any]) -> None:
    """Newlines, which no patch stands behind, get nothing."""
    model, processor = tiny_model(name)
    size = (30, 100)
    inputs = tiny_inputs(name, (1,), [size])
    with torch.inference_mode(), compress(model, "visionzip:0.5", processor=processor):
        model(**inputs)
    received = weights(model, name, inputs)
    ((looked, places),) = seen
    found = looked.scores[places]
    side = round(received.shape[1] ** 0.5)
    assert torch.allclose(found[: side * side], received[0], atol=1e-6)
    from transformers.models.llava_next.modeling_llava_next import get_anyres_image_grid_shape

    rows, columns = get_anyres_image_grid_shape(
        size, model.config.image_grid_pinpoints, model.config.vision_config.image_size
    )
    mosaic = torch.empty(rows * side, columns * side)
    for row in range(rows * side):
        for column in range(columns * side):
            tile = 1 + row // side * columns + column // side
            mosaic[row, column] = received[tile].view(side, side)[row % side, column % side]
    height = round(size[0] * columns * side / size[1], 7)  # wider than the mosaic: rows are padding
    cut = (rows * side - int(height)) // 2
    mosaic = mosaic[cut : rows * side - cut]
    expected = torch.cat([mosaic, torch.zeros(len(mosaic), 1)], 1).flatten()
    assert torch.allclose(found[side * side :], expected, atol=1e-6)


@pytest.mark.parametrize("name", [*WITH_CLASS_TOKEN, *WITHOUT])
def test_batches_and_generate_see_the_same(name: str, seen: list[Any]) -> None:
    model, processor = tiny_model(name)
    batch, singles = batch_and_singles(name, (2, 0, 1))
    before = fingerprint(model)
    with as_it_was(model), compress(model, "visionzip:0.5", processor=processor) as run:
        model(**batch)
    together, seen[:] = list(seen), []
    assert fingerprint(model) == before
    said = "attention of the class token" if name in WITH_CLASS_TOKEN else "mean attention received"
    assert any(f"the score is {said} of the image encoder" in note for note in run.report.notes)
    for single in singles:
        with as_it_was(model), compress(model, "visionzip:0.5", processor=processor):
            model.generate(**single, max_new_tokens=2, do_sample=False)
    for (one, here), (other, there) in zip(together, seen, strict=True):
        assert one.by == other.by == said
        assert torch.allclose(one.scores[here], other.scores[there], atol=1e-6)
    seen.clear()
    with as_it_was(model), compress(model, "visionzip:0.5", processor=processor):
        model.generate(**singles[0], max_new_tokens=2, num_beams=2, do_sample=False)
    expected = [pair for pair in together[:2] for _ in range(1)] * 2
    for (one, here), (other, there) in zip(seen, expected, strict=True):
        assert torch.allclose(one.scores[here], other.scores[there], atol=1e-6)


@pytest.mark.parametrize("name", BLIND)
def test_where_it_cannot_be_told_the_report_says_so(name: str, seen: list[Any]) -> None:
    model, processor = tiny_model(name)
    with as_it_was(model), compress(model, "visionzip:0.5", processor=processor) as run:
        model(**turn(name, 1))
    assert [looked for looked, _ in seen] == [None]
    assert any("not attention of the image encoder" in note for note in run.report.notes)


def test_the_most_looked_at_stay(seen: list[Any]) -> None:
    model, processor = tiny_model("llava")
    with as_it_was(model), compress(model, "visionzip:5(contextual=0)", processor=processor) as run:
        model(**turn("llava", 1))
    ((looked, places),) = seen
    best = looked.scores[places].topk(5).indices.sort().values
    layout = run.cache.progress.layouts[0]
    held = run.cache.held(0)
    assert torch.equal(held[layout.visual[held]], places[best])


def test_other_scores_do_not_listen_to_the_encoder(seen: list[Any]) -> None:
    model, processor = tiny_model("llava")
    for score in ("distinct", "norm"):
        plan = f"visionzip:0.5(score={score})"
        with as_it_was(model), compress(model, plan, processor=processor):
            hooks = [m for m in model.modules() if m._forward_pre_hooks]
            model(**turn("llava", 1))
        assert not hooks
    assert [looked for looked, _ in seen] == [None, None]
