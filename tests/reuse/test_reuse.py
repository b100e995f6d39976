"""The reuse stage equals its reference, and is plain Transformers where it refreshes all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from conduit_kv import VLM, PlanError, Store, compress
from conduit_kv.engine.request import RequestCache
from conduit_kv.families import family_of
from tests.contracts.helpers import error, plain_logits, with_cache
from tests.reuse.byhand import ByHand
from tests.tiny import FAMILY_NAMES, tiny_inputs, tiny_model
from tests.tiny.parts import picture

TWO_PASS = (
    "conduit:0.2",
    "prophetkv:0.2",
    "kvshare:0.2",
    "first-refresh:0.2",
    "random-refresh:0.2",
    "reuse-all",
)


def run(
    name: str, plan: str, inputs: Mapping[str, Any], store: Store | None = None
) -> tuple[Tensor, RequestCache]:
    """Logits ``[V]`` of the newest token, and the cache."""
    model, processor = tiny_model(name)
    with torch.inference_mode(), compress(model, plan, store=store, processor=processor) as at:
        cache = at.new_cache()
        arguments = {k: v for k, v in inputs.items() if k != "attention_mask"}
        logits = model(**arguments, **with_cache(model, cache), logits_to_keep=1).logits[0, -1]
    return logits, cache


def asking(images: int) -> list[dict[str, Any]]:
    content = [{"type": "image"}] * images + [{"type": "text", "text": "What is in this picture?"}]
    return [{"role": "user", "content": content}]


def by_hand(name: str, inputs: Mapping[str, Any], cache: RequestCache) -> ByHand:
    model, _ = tiny_model(name)
    family = family_of(model)
    ids = inputs["input_ids"][0]
    (layout,) = family.layouts(model, [ids], inputs)
    pieces = family.pieces(model, ids, inputs, layout)
    assert cache.shelf is not None
    assert cache.reuse is not None
    return ByHand(model, family, inputs, pieces, cache.shelf.context(cache.reuse.method.context))


def rows_of(reference: ByHand) -> tuple[list[int], list[int], list[int]]:
    visual = reference.visual.nonzero().flatten().tolist()
    text = (~reference.visual).nonzero().flatten().tolist()
    span = [token for token in text if token > visual[-1]] or visual[-1:]
    return visual, text, span


def reference_logits(reference: ByHand, chosen: list[int], *, refresh_text: bool = False) -> Tensor:
    _, text, span = rows_of(reference)
    states = reference.run(text)
    if chosen:
        states = reference.run(sorted({*chosen, *(text if refresh_text else span)}))
    return reference.logits(states)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_equals_a_plain_forward_over_a_cache_built_by_hand(name: str) -> None:
    inputs = tiny_inputs(name, n_images=(2,))
    for plan in TWO_PASS:
        logits, cache = run(name, plan, inputs)
        reference = by_hand(name, inputs, cache)
        assert cache.reuse is not None
        chosen = cache.reuse.refreshed.tolist()
        visual, _, _ = rows_of(reference)
        assert len(chosen) == (0 if plan == "reuse-all" else math.ceil(0.2 * len(visual)))
        assert error(logits, reference_logits(reference, chosen)) <= 1e-5


@pytest.mark.parametrize("name", ("llava", "qwen3-vl", "smolvlm"))
@pytest.mark.parametrize("options", ("refresh_text=true", "context=none"))
def test_options_have_their_references(name: str, options: str) -> None:
    inputs = tiny_inputs(name, n_images=(2,))
    for method in ("conduit", "random-refresh"):
        logits, cache = run(name, f"{method}:0.2({options})", inputs)
        reference = by_hand(name, inputs, cache)
        assert cache.reuse is not None
        expected = reference_logits(
            reference, cache.reuse.refreshed.tolist(), refresh_text="refresh" in options
        )
        assert error(logits, expected) <= 1e-5


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_conduit_chooses_by_its_formula(name: str) -> None:
    inputs = tiny_inputs(name, n_images=(3,))
    _, cache = run(name, "conduit:0.2", inputs)
    reference = by_hand(name, inputs, cache)
    visual, text, span = rows_of(reference)
    values = [dict(layer) for layer in reference.values]
    reference.run(text)
    at = [text.index(token) for token in span]
    score = {token: 0.0 for token in visual}
    for attention, stored in zip(reference.attention, values, strict=True):
        mass = attention[0].mean(0)[at].mean(0)
        for token in visual:
            norm = float(stored[token].pow(2).sum().sqrt())
            score[token] += float(mass[reference.columns.index(token)]) * norm
    image_of = {token: piece.image for piece in reference.pieces for token in piece.tokens.tolist()}
    images = sorted(set(image_of.values()))
    mean = {
        number: sum(score[t] for t in visual if image_of[t] == number)
        / sum(image_of[t] == number for t in visual)
        for number in images
    }
    whole = sum(mean.values()) / len(mean)
    weighted = {t: score[t] * mean[image_of[t]] / whole for t in visual}  # beta = 1
    count = math.ceil(0.2 * len(visual))
    ranked = sorted(visual, key=lambda token: (-weighted[token], token))
    gap = (weighted[ranked[count - 1]] - weighted[ranked[count]]) / weighted[ranked[0]]
    assert cache.reuse is not None
    if gap > 1e-5:
        assert sorted(ranked[:count]) == cache.reuse.refreshed.tolist()
    else:
        assert len(set(ranked[:count]) & set(cache.reuse.refreshed.tolist())) >= count - 1


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_cacheblend_runs_what_deviates_layer_by_layer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from conduit_kv.stages.reuse import _Pilot

    pilots: list[_Pilot] = []
    made = _Pilot.__post_init__
    monkeypatch.setattr(_Pilot, "__post_init__", lambda self: (made(self), pilots.append(self)))
    inputs = tiny_inputs(name, n_images=(2,))
    logits, cache = run(name, "cacheblend:0.4", inputs)
    (pilot,) = pilots
    reference = by_hand(name, inputs, cache)
    visual, text, _ = rows_of(reference)
    chosen = [mine.tolist() for mine in pilot.by_layer]
    rows = [sorted({*mine, *text}) for mine in chosen]
    assert error(logits, reference.logits(reference.run_layer_by_layer(rows))) <= 1e-5
    # Each layer has the best of the one before, by the change of K and V.
    assert chosen[0] == visual
    mean = 0.4 * len(visual)
    counts = [len(mine) for mine in chosen[1:]]
    assert counts == sorted(counts, reverse=True)
    assert abs(sum(counts) / len(counts) - math.ceil(mean)) <= 1
    for layer in range(1, len(chosen)):
        change = reference.change[layer]
        assert sorted(change) == chosen[layer - 1]
        best = sorted(change, key=lambda token: (-change[token], token))[: len(chosen[layer])]
        left = min(change[token] for token in best)
        # Where two tokens differ by rounding alone, either may have been taken.
        for token in set(best) ^ set(chosen[layer]):
            assert abs(change[token] - left) <= 1e-5 * left


@pytest.mark.parametrize("name", ("llava", "qwen2.5-vl"))
def test_kvshare_chooses_by_attention_and_change(name: str) -> None:
    inputs = tiny_inputs(name, n_images=(2,))
    _, cache = run(name, "kvshare:0.2", inputs)
    reference = by_hand(name, inputs, cache)
    again = by_hand(name, inputs, cache)
    visual, text, span = rows_of(reference)
    stored = dict(reference.values[1])
    everything = list(range(len(reference.visual)))
    again.run_layer_by_layer([everything, everything, *[text] * (len(reference.keys) - 2)])
    reference.run(text)
    at = [text.index(token) for token in span]
    score = {token: 0.0 for token in visual}
    for attention in reference.attention[1:]:
        mass = attention[0].mean(0)[at].mean(0)
        for token in visual:
            change = float((again.values[1][token] - stored[token]).abs().sum())
            score[token] += float(mass[reference.columns.index(token)]) * change
    count = math.ceil(0.2 * len(visual))
    ranked = sorted(visual, key=lambda token: (-score[token], token))
    gap = (score[ranked[count - 1]] - score[ranked[count]]) / score[ranked[0]]
    assert gap > 1e-5
    assert cache.reuse is not None
    assert sorted(ranked[:count]) == cache.reuse.refreshed.tolist()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_everything_refreshed_is_plain_transformers(name: str) -> None:
    """Both by the plain path of r = 1 and by the machinery with all tokens chosen."""
    model, _ = tiny_model(name)
    inputs = tiny_inputs(name, n_images=(2,))
    plain = plain_logits(model, inputs)[0, -1]
    visual = int(family_of(model).visual_mask(model, inputs["input_ids"]).sum())
    assert error(run(name, "conduit:1.0", inputs)[0], plain) <= 1e-5
    logits, cache = run(name, f"conduit:{visual}(refresh_text=true)", inputs)
    assert cache.reuse is not None
    assert len(cache.reuse.refreshed) == visual
    assert error(logits, plain) <= 1e-5


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_hit_is_what_a_miss_computes(name: str) -> None:
    """In any order, with other text and other images around."""
    store = Store()
    first = tiny_inputs(name, n_images=(3,))
    cold, cache = run(name, "conduit:0.2", first, store)
    assert cache.reuse is not None
    assert cache.reuse.usage.cached_image_tokens == 0
    warm, cache = run(name, "conduit:0.2", first, store)
    assert cache.reuse is not None
    assert cache.reuse.usage.computed_tokens == 0
    assert cache.reuse.usage.cached_image_tokens == cache.reuse.usage.image_tokens
    assert torch.equal(cold, warm)
    other = tiny_inputs(name, n_images=(2,), text=("What ", " is that and ", " please?"))
    found, cache = run(name, "conduit:0.2", other, store)
    assert cache.reuse is not None
    assert cache.reuse.usage.computed_tokens == 0
    assert torch.equal(found, run(name, "conduit:0.2", other)[0])


@pytest.mark.parametrize("plan", ["conduit:0.2", "reuse-all"])
def test_images_that_changed_places_are_not_mixed_up(plan: str) -> None:
    """Through one store, each order answers as it does with a store of its own."""
    vlm, store = VLM(*tiny_model("llava")), Store()
    pictures = [picture(56, 56, seed) for seed in (1, 2)]
    found = {}
    for order in ((0, 1), (1, 0), (0, 0)):
        shown = [pictures[number] for number in order]
        inputs = vlm.process(vlm.render(asking(2)), shown)
        found[order] = vlm.prefill(inputs, plan, store=store)
        assert torch.equal(found[order].logits, vlm.prefill(inputs, plan, store=Store()).logits)
    assert not torch.equal(found[0, 1].logits, found[1, 0].logits)
    assert found[1, 0].cache.reuse.usage.computed_tokens == 0
    assert found[0, 0].cache.reuse.usage.computed_tokens == 0


def test_an_entry_is_shared_by_what_looks_the_same_and_by_nothing_else() -> None:
    """Modes whose pixels the encoder sees alike are one entry; others are not."""
    vlm, store = VLM(*tiny_model("llava")), Store()
    colour = picture(56, 56, 3)
    grey = colour.convert("L")

    def computed(image: Image.Image) -> int:
        inputs = vlm.process(vlm.render(asking(1)), [image])
        return vlm.prefill(inputs, "reuse-all", store=store).cache.reuse.usage.computed_tokens

    assert computed(colour) > 0
    assert computed(colour.convert("RGBA")) == 0
    assert computed(grey) > 0
    assert computed(grey.convert("RGB")) == 0
    assert computed(colour.transpose(Image.Transpose.ROTATE_90)) > 0


def test_decoding_goes_on_from_what_was_refreshed() -> None:
    """Three steps of decoding equal the reference's, on all rows that it then holds."""
    name = "qwen2.5-vl"
    model, processor = tiny_model(name)
    inputs = tiny_inputs(name, n_images=(2,))
    _, cache = run(name, "conduit:0.2", inputs)
    reference = by_hand(name, inputs, cache)
    assert cache.reuse is not None
    reference_logits(reference, cache.reuse.refreshed.tolist())
    for layer, held in enumerate(cache.layers):
        tokens, keys, values = held.read(0, [0, 1])
        assert tokens.tolist() == sorted(reference.keys[layer])
        for at, token in enumerate(tokens.tolist()):
            assert error(keys[:, at], reference.keys[layer][token]) <= 1e-4
            assert error(values[:, at], reference.values[layer][token]) <= 1e-4
    with torch.inference_mode(), compress(model, "conduit:0.2", processor=processor):
        one = model(input_ids=torch.tensor([[9]]), **with_cache(model, cache)).logits
    assert bool(torch.isfinite(one).all())
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 1


def test_what_cannot_be_done_is_said_before_anything_runs() -> None:
    model, processor = tiny_model("llava")
    batch = tiny_inputs("llava", n_images=(1, 1))
    with (
        compress(model, "conduit:0.2", processor=processor),
        pytest.raises(PlanError, match="run them one by one"),
    ):
        model(**batch)
    one = tiny_inputs("llava", n_images=(1,))
    with compress(model, "conduit:0.2"), pytest.raises(PlanError, match="context=none"):
        model(**one)
    with (
        compress(model, "conduit:0.2", processor=processor),
        pytest.raises(PlanError, match="labels"),
    ):
        model(**one, labels=one["input_ids"])
    sliding, its = tiny_model("llava-next-sliding")
    with (
        compress(sliding, "conduit:0.2", processor=its),
        pytest.raises(PlanError, match="causal full attention"),
    ):
        sliding(**tiny_inputs("llava-next-sliding", n_images=(1,)))
