"""Text that a prompt begins with is taken from the store, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conduit_kv import VLM, PlanError, Store, compress
from conduit_kv.cli import main
from conduit_kv.engine.request import RequestCache
from conduit_kv.families import family_of
from conduit_kv.reuse.keys import TEXT_BLOCK, Key
from tests.contracts.helpers import error, plain_logits, with_cache
from tests.reuse.test_reuse import TWO_PASS, by_hand, reference_logits, rows_of, run
from tests.tiny import FAMILY_NAMES, tiny_inputs, tiny_model
from tests.tiny.parts import picture

SYSTEM = "You are a helpful assistant that looks at pictures. " * 2
PLANS = ("kvshare:0.2", "first-refresh:0.2", "conduit:0.2(refresh_text=true)", "reuse-all")
"""One of each way in which a turn is run in passes; cacheblend's single one is below."""
SCORED = (
    "conduit:0.2 + h2o:0.5",
    "first-refresh:0.2(refresh_text=true) + tgv-kv:0.5",
    "cacheblend:0.4 + h2o:0.5",
    "reuse-all + h2o:0.5",
)


def asked(name: str, before: str = SYSTEM, **options: Any) -> Mapping[str, Any]:
    options = {"n_images": (2,), **options}
    return tiny_inputs(name, text=(before, " and ", " Where is the red dog?"), **options)


def opening_of(name: str, inputs: Mapping[str, Any]) -> int:
    """Text tokens before the first image."""
    model, _ = tiny_model(name)
    return int(family_of(model).visual_mask(model, inputs["input_ids"][0]).nonzero()[0])


def cached_text(cache: RequestCache) -> int:
    assert cache.reuse is not None
    return cache.reuse.usage.cached_text_tokens


def stored_in(folder: Path, **options: Any) -> Store:
    """A store that always loads: these models compute faster than a disk is read."""
    store = Store(folder, **options)
    store.costs.fill = {"image": 1.0, "text": 1.0}
    return store


def rows_run(cache: RequestCache) -> list[int]:
    return [layer.work[0] for layer in cache]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_hit_equals_its_reference_and_runs_that_much_less(name: str) -> None:
    inputs = asked(name)
    whole = opening_of(name, inputs) // TEXT_BLOCK * TEXT_BLOCK
    assert whole >= 2 * TEXT_BLOCK
    for plan in PLANS:
        store = Store()
        cold, missed = run(name, plan, inputs, store)
        warm, hit = run(name, plan, inputs, store)
        assert cached_text(missed) == 0
        assert cached_text(hit) == whole
        assert rows_run(hit) == [rows - whole for rows in rows_run(missed)]
        reference = by_hand(name, inputs, hit)
        assert hit.reuse is not None
        chosen = hit.reuse.refreshed.tolist()
        assert missed.reuse is not None
        assert missed.reuse.refreshed.tolist() == chosen
        expected = reference_logits(reference, chosen, refresh_text="refresh_text" in plan)
        assert error(cold, expected) <= 1e-5
        assert error(warm, expected) <= 1e-5
    for layer, held in enumerate(hit.layers):
        tokens, keys, values = held.read(0, range(held.kv_heads))
        assert len(tokens) == inputs["input_ids"].shape[1]
        for found, expected in ((keys, reference.keys), (values, reference.values)):
            wanted = torch.stack([expected[layer][at] for at in range(whole)], 1)
            assert error(found[:, :whole], wanted) <= 1e-5


@pytest.mark.parametrize("name", ("llava", "qwen3-vl", "smolvlm"))
def test_a_hit_chooses_and_keeps_as_a_miss(name: str) -> None:
    """What is in the store changes neither the answer nor what is refreshed or kept."""
    inputs = asked(name)
    for plan in SCORED:
        store = Store()
        cold, missed = run(name, plan, inputs, store)
        warm, hit = run(name, plan, inputs, store)
        assert cached_text(hit) > 0
        assert error(warm, cold) <= 1e-5
        assert hit.reuse is not None
        assert missed.reuse is not None
        assert torch.equal(hit.reuse.refreshed, missed.reuse.refreshed)
        for layer in range(len(hit)):
            assert torch.equal(hit.held(layer), missed.held(layer))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_everything_refreshed_is_plain_transformers(name: str) -> None:
    """But for the text: that of the store is as exact as what is computed."""
    inputs, store = asked(name), Store()
    model, _ = tiny_model(name)
    plain = plain_logits(model, inputs)[0, -1]
    visual = int(family_of(model).visual_mask(model, inputs["input_ids"]).sum())
    for times in range(2):
        logits, cache = run(name, f"conduit:{visual}(refresh_text=true)", inputs, store)
        assert bool(cached_text(cache)) == bool(times)
        assert error(logits, plain) <= 1e-5
    assert error(run(name, "conduit:1.0", inputs)[0], plain) <= 1e-5


@pytest.mark.parametrize("name", ("llava", "qwen3-vl"))
def test_a_single_pass_goes_on_from_stored_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from conduit_kv.stages.reuse import _Pilot

    pilots: list[_Pilot] = []
    made = _Pilot.__post_init__
    monkeypatch.setattr(_Pilot, "__post_init__", lambda self: (made(self), pilots.append(self)))
    inputs, store = asked(name), Store()
    run(name, "cacheblend:0.4", inputs, store)
    logits, cache = run(name, "cacheblend:0.4", inputs, store)
    assert cached_text(cache) > 0
    reference = by_hand(name, inputs, cache)
    _, text, _ = rows_of(reference)
    rows = [sorted({*mine.tolist(), *text}) for mine in pilots[-1].by_layer]
    assert error(logits, reference.logits(reference.run_layer_by_layer(rows))) <= 1e-5


@pytest.mark.parametrize("plan", ("conduit:0.2", "kvshare:0.2", "cacheblend:0.4", "reuse-all"))
def test_prompts_share_the_blocks_that_they_have_in_common(plan: str) -> None:
    name, store = "qwen2.5-vl", Store()
    run(name, plan, asked(name), store)
    other = asked(name, SYSTEM + "Look at the two of these before you say what is where please: ")
    common = opening_of(name, asked(name)) // TEXT_BLOCK * TEXT_BLOCK
    logits, cache = run(name, plan, other, store)
    assert cached_text(cache) == common < opening_of(name, other)
    assert error(logits, run(name, plan, other)[0]) <= 1e-5
    # The blocks after them were stored meanwhile.
    _, cache = run(name, plan, other, store)
    assert cached_text(cache) == opening_of(name, other) // TEXT_BLOCK * TEXT_BLOCK > common
    # From the first other token on nothing is shared.
    assert cached_text(run(name, plan, asked(name, "So " + SYSTEM), store)[1]) == 0


def test_what_is_shorter_than_a_block_is_not_stored() -> None:
    store = Store()
    inputs = asked("llava", "Look at this ")
    assert opening_of("llava", inputs) < TEXT_BLOCK
    run("llava", "conduit:0.2", inputs, store)
    assert len(store.memory) == 2  # the images
    assert cached_text(run("llava", "conduit:0.2", inputs, store)[1]) == 0


def test_text_of_a_later_turn_is_computed() -> None:
    """It sees what was before it."""
    name, store = "qwen2.5-vl", Store()
    model, processor = tiny_model(name)
    for _ in range(2):
        with (
            torch.inference_mode(),
            compress(model, "conduit:0.2", store=store, processor=processor) as at,
        ):
            cache = at.new_cache()
            model(input_ids=torch.arange(5, 9)[None], **with_cache(model, cache))
            later = {k: v for k, v in asked(name).items() if k != "attention_mask"}
            model(**later, **with_cache(model, cache))
        assert cached_text(cache) == 0
    assert cache.reuse is not None
    assert cache.reuse.usage.cached_image_tokens > 0


# -- few rows are left -----------------------------------------------------------------------------


def cut(name: str, after: int) -> dict[str, Any]:
    """A prompt that begins with two whole blocks and ends ``after`` tokens after its only image."""
    inputs = dict(asked(name, n_images=(1,)))
    mask = family_of(tiny_model(name)[0]).visual_mask(tiny_model(name)[0], inputs["input_ids"][0])
    visual = mask.nonzero().flatten()
    columns = slice(int(visual[0]) - 2 * TEXT_BLOCK, int(visual[-1]) + 1 + after)
    for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if key in inputs:
            inputs[key] = inputs[key][:, columns]
    return inputs


@pytest.mark.parametrize("plan", (*TWO_PASS, "cacheblend:0.4"))
@pytest.mark.parametrize("after", (1, 0))
def test_one_row_of_text_or_none_is_enough(plan: str, after: int) -> None:
    name, store = "llava", Store()
    inputs = cut(name, after)
    if plan == "reuse-all" and not after:
        with pytest.raises(PlanError, match="end the prompt with text"):
            run(name, plan, inputs, store)
        return
    cold, _ = run(name, plan, inputs, store)
    warm, hit = run(name, plan, inputs, store)
    assert cached_text(hit) == 2 * TEXT_BLOCK
    assert error(warm, cold) <= 1e-5
    if plan != "cacheblend:0.4":
        reference = by_hand(name, inputs, hit)
        assert hit.reuse is not None
        assert error(warm, reference_logits(reference, hit.reuse.refreshed.tolist())) <= 1e-5
    kept = run(name, f"{plan} + h2o:0.5", inputs, store)[1]
    assert len(kept.held(0)) < inputs["input_ids"].shape[1]


# -- keys and the store ----------------------------------------------------------------------------


def test_keys_tell_apart_all_that_text_depends_on() -> None:
    model, _ = tiny_model("llava")
    ids = torch.arange(3 * TEXT_BLOCK + 5)
    keys = Key.of_text(ids, model)
    assert len(keys) == 3
    assert keys == Key.of_text(ids[: 3 * TEXT_BLOCK], model)
    assert keys[:2] == Key.of_text(ids[: 3 * TEXT_BLOCK - 1], model)

    def changed(at: int) -> list[Key]:
        other: Tensor = ids.clone()
        other[at] += 1
        return Key.of_text(other, model)

    assert changed(TEXT_BLOCK)[0] == keys[0]
    low = copy.deepcopy(model).bfloat16()
    others = [
        *changed(0),
        *changed(TEXT_BLOCK)[1:],
        *Key.of_text(ids, model, tenant="another"),
        *Key.of_text(ids, low),
        *Key.of_text(ids, tiny_model("llava-siglip")[0]),
        *Key.of_text(torch.cat([ids[TEXT_BLOCK:], ids[:TEXT_BLOCK]]), model),
    ]
    assert len({key.digest for key in (*keys, *others)}) == len(keys) + len(others)


def test_text_comes_back_from_disk_up_to_what_is_damaged(tmp_path: Path) -> None:
    name = "qwen3-vl"
    inputs = asked(name)
    cold, _ = run(name, "conduit:0.2", inputs, stored_in(tmp_path))
    warm, cache = run(name, "conduit:0.2", inputs, stored_in(tmp_path))
    assert cached_text(cache) == 2 * TEXT_BLOCK
    assert error(warm, cold) <= 1e-5
    assert (
        cached_text(run(name, "conduit:0.2", inputs, stored_in(tmp_path, tenant="other"))[1]) == 0
    )
    second = Key.of_text(inputs["input_ids"][0], tiny_model(name)[0])[1]
    path = tmp_path / "entries" / second.digest[:2] / f"{second.digest}.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    store = stored_in(tmp_path)
    logits, cache = run(name, "conduit:0.2", inputs, store)
    assert cached_text(cache) == TEXT_BLOCK
    assert error(logits, cold) <= 1e-5
    assert any(second.digest[:12] in note for note in store.notes)
    assert cached_text(run(name, "conduit:0.2", inputs, stored_in(tmp_path))[1]) == 2 * TEXT_BLOCK


def test_text_counts_towards_the_limits() -> None:
    name = "llava"
    inputs, store = asked(name), Store()
    run(name, "reuse-all", inputs, store)
    held = [held for _, held in store.memory._held.values()]
    assert len(held) == 4
    assert store.memory.nbytes == sum(each.nbytes for each in held)
    small = Store(memory=store.memory.nbytes - 1)
    run(name, "reuse-all", inputs, small)
    assert len(small.memory) == 3
    storages = [t.untyped_storage().nbytes() for each in held for t in each.tensors.values()]
    assert sum(storages) == store.memory.nbytes  # no block holds on to what was computed with it


def test_the_report_and_the_commands_name_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vlm = VLM(*tiny_model("qwen2.5-vl"))
    messages = [
        {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    ]
    text = "<s>" + SYSTEM + vlm.render(messages)
    inputs = vlm.process(text, [picture(28, 42, 1)])
    vlm.prefill(inputs, "conduit:0.2", store=stored_in(tmp_path))
    report = vlm.prefill(inputs, "conduit:0.2", store=stored_in(tmp_path)).report
    blocks = report.usage["cached_text_tokens"] // TEXT_BLOCK
    assert blocks >= 2
    assert report.usage["cached_tokens"] == report.usage["image_tokens"] + TEXT_BLOCK * blocks
    assert f"text: {TEXT_BLOCK * blocks} of " in str(report)
    assert f"{blocks + 1} entries" in str(report)
    folder = str(tmp_path)
    assert main(["store", "ls", folder]) == 0
    listed = capsys.readouterr().out
    assert listed.count("text") == blocks
    assert listed.count("image") == 1
    assert main(["store", "stat", folder]) == 0
    assert f"{blocks + 1} entries (1 of images, {blocks} of text)" in capsys.readouterr().out
    assert main(["store", "verify", folder]) == 0
    assert main(["store", "prune", folder, "--max-bytes", "0B"]) == 0
    assert f"{blocks + 1} entries removed" in capsys.readouterr().out
