"""A question over what it chose equals a plain forward over a cache built by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conduit_kv.engine.runner import Runner
from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.hold.base import Scene, Where
from conduit_kv.plan import Plan
from conduit_kv.retrieve import contiguous_positions
from tests.contracts.helpers import error, turn
from tests.retrieve.reference import Alone, alone, by_hand, seen_by
from tests.tiny import FAMILY_NAMES, VIDEO_NAMES, tiny_inputs, tiny_model

TOLERANCE = 1e-4
METHODS = ("random-select", "uniform-frames", "mean-similarity", "attention-select", "rekv")
CASES = [(name, METHODS[n % len(METHODS)]) for n, name in enumerate(FAMILY_NAMES)]


def runner(name: str) -> Runner:
    return Runner(*tiny_model(name), name)


def check(vlm: Runner, state: Any, images: Any, positions: str = "contiguous") -> None:
    retrieval = state.cache.retrieval
    seen = seen_by(state, retrieval.choice.tokens)
    layout = state.cache.progress.layouts[0]
    if positions == "contiguous":
        places = contiguous_positions(layout, retrieval.positions, seen)
    else:
        places = retrieval.positions[:, seen]
    expected = by_hand(vlm.model, torch.tensor(state.ids), images, seen, places)
    assert error(state.logits[0], expected) <= TOLERANCE


@pytest.mark.parametrize(("name", "method"), CASES)
def test_everything_chosen_equals_the_cache_by_hand(name: str, method: str) -> None:
    vlm, inputs = runner(name), turn(name, 3)
    state = vlm.prefill(inputs, f"{method}:100000")
    retrieval = state.cache.retrieval
    assert len(retrieval.choice.tokens) == retrieval.bank.size
    images = alone(vlm.model, inputs, retrieval.shelf.prefix)
    check(vlm, state, images)
    # Where everything is seen nothing moves.
    seen = seen_by(state, retrieval.choice.tokens)
    layout = state.cache.progress.layouts[0]
    assert torch.equal(contiguous_positions(layout, retrieval.positions, seen), retrieval.positions)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_quest_over_all_pages_equals_the_cache_by_hand(name: str) -> None:
    vlm, inputs = runner(name), turn(name, 2)
    state = vlm.prefill(inputs, "quest:100000(page=4)")
    images = alone(vlm.model, inputs, state.cache.retrieval.shelf.prefix)
    check(vlm, state, images, "kept")


@pytest.mark.parametrize("positions", ["contiguous", "kept"])
@pytest.mark.parametrize("unit", ["image", "token"])
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "qwen3-vl", "idefics3"])
def test_some_chosen_equals_the_cache_by_hand(name: str, unit: str, positions: str) -> None:
    vlm, inputs = runner(name), turn(name, 3)
    plan = f"random-select:0.4(unit={unit}, positions={positions}, seed=3)"
    state = vlm.prefill(inputs, plan)
    retrieval = state.cache.retrieval
    assert len(retrieval.choice.tokens) == round(0.4 * retrieval.bank.size)
    images = alone(vlm.model, inputs, retrieval.shelf.prefix)
    check(vlm, state, images, positions)


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen3-vl"])
def test_the_next_question_chooses_anew_and_sees_the_whole_conversation(name: str) -> None:
    vlm, first = runner(name), turn(name, 2)
    state = vlm.prefill(first, "attention-select:0.3(unit=token)")
    before = state.cache.retrieval.choice.tokens
    images = alone(vlm.model, first, state.cache.retrieval.shelf.prefix)
    vlm.step([state], [7])
    vlm.step([state], [9])
    later = turn(name, 1, " And the red dog, where is it?", seed=5, first=False)
    start = len(state.ids)
    state = vlm.extend(state, later)
    prefix = state.cache.retrieval.shelf.prefix
    images += alone(vlm.model, later, prefix, start)
    check(vlm, state, images)
    assert not torch.equal(before, state.cache.retrieval.choice.tokens)


@pytest.mark.parametrize("name", [n for n in VIDEO_NAMES if "sliding" not in n])
def test_a_videos_frames_are_chosen_one_by_one(name: str) -> None:
    vlm = runner(name)
    inputs = tiny_inputs(name, n_images=(0,), n_videos=(1,), frames=8)
    state = vlm.prefill(inputs, "uniform-frames:0.5")
    retrieval = state.cache.retrieval
    images = alone(vlm.model, inputs, retrieval.shelf.prefix)
    if vlm.family.position_axes > 1:
        assert len(retrieval.bank) == 4
        assert torch.bincount(retrieval.bank.unit[retrieval.choice.tokens]).gt(0).sum() == 2
    check(vlm, state, images)


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_decoding_goes_on_over_what_was_chosen(name: str) -> None:
    """Token by token equals the same text asked at once."""
    vlm, inputs = runner(name), turn(name, 2)
    state = vlm.prefill(inputs, "random-select:0.5")
    chosen = state.cache.retrieval.choice.tokens
    images = alone(vlm.model, inputs, state.cache.retrieval.shelf.prefix)
    for token in (5, 6, 7):
        vlm.step([state], [token])
    assert torch.equal(state.cache.retrieval.choice.tokens, chosen)
    check(vlm, state, images)


@pytest.mark.parametrize("hold", ["kivi:4", "rtn:8", "fp8", "stride-interpolate:0.5(block=4)"])
@pytest.mark.parametrize(("name", "method"), CASES)
def test_packed_entries_equal_the_cache_by_hand(name: str, method: str, hold: str) -> None:
    """What a question reads of an image is what the hold method makes of it, layer by layer."""
    vlm, inputs = runner(name), turn(name, 3)
    state = vlm.prefill(inputs, f"{method}:0.5 + {hold}")
    retrieval = state.cache.retrieval
    images = alone(vlm.model, inputs, retrieval.shelf.prefix)
    if method != "rekv":
        check(vlm, state, [packed(image, hold) for image in images])
    later = turn(name, 0, " And the blue one?", first=False)
    vlm.extend(state, later)
    seen = state.cache.retrieval.choice.tokens
    keys, values = retrieval.bank.gather(seen)
    units = retrieval.bank.parts(seen)
    by = [packed(images[unit], hold) for unit, _ in units]
    for got, mine in ((keys, [x.keys for x in by]), (values, [x.values for x in by])):
        parts = [x[:, :, at] for x, (_, at) in zip(mine, units, strict=True)]
        assert error(got, torch.cat(parts, 2)) <= TOLERANCE


def packed(image: Alone, hold: str) -> Alone:
    """An image alone with K and V as a hold method gives them back, in one row of cells."""
    method = Plan.parse(hold).hold
    assert method is not None
    count = len(image.tokens)
    layout = Layout.of(torch.ones(count, dtype=torch.bool), [Grid(1, 1, count)])
    bits = method.bits_of(Scene(layout, lambda: torch.empty(0), apart=True), torch.arange(count))
    at = torch.nonzero(bits < 16).flatten()
    keys, values = image.keys.clone(), image.values.clone()
    for layer in range(len(keys)):
        where = Where(layer, 0, keys.shape[1], at, lambda t: unturned(len(t), keys.shape[-1]))
        mine = keys[layer][:, at], values[layer][:, at]
        store = method.store(*mine, int(bits.min()), where)
        k, v = store.dense(torch.float32)
        keys[layer][:, at], values[layer][:, at] = k[:, : len(at)], v[:, : len(at)]
    return Alone(keys, values, image.tokens)


def unturned(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(count, width // 2), torch.zeros(count, width // 2)
