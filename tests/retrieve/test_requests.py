"""Requests under a retrieve plan: identity, turns, forks, errors, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import conduit_kv as ckv
from conduit_kv.engine.runner import Runner
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import InputError, PlanError
from conduit_kv.methods.base import registry
from conduit_kv.methods.retrieve import RetrieveMethod
from tests.contracts.helpers import batch_and_singles, error, turn
from tests.tiny import FAMILY_NAMES, tiny_model
from tests.tiny.parts import picture

NAMES = sorted(n for n, m in registry().items() if issubclass(m, RetrieveMethod))


def runner(name: str) -> Runner:
    return Runner(*tiny_model(name), name)


@pytest.mark.parametrize(("name", "method"), list(zip(FAMILY_NAMES, NAMES * 2, strict=False)))
def test_at_its_identity_setting_a_method_is_the_plain_model(name: str, method: str) -> None:
    vlm, inputs = runner(name), turn(name, 2)
    with torch.inference_mode():
        plain = vlm.model(**inputs).logits[0, -1]
    if hasattr(vlm.model.model, "rope_deltas"):
        vlm.model.model.rope_deltas = None
    state = vlm.prefill(inputs, f"{method}:1.0")
    assert state.cache.retrieval is None
    assert error(state.logits[0], plain) <= 1e-5


@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl", "idefics3"])
def test_generate_under_compress(name: str) -> None:
    model, processor = tiny_model(name)
    vlm, inputs = runner(name), turn(name, 2)
    with ckv.compress(model, "uniform-frames:6", processor=processor) as run:
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    state = vlm.prefill(inputs, "uniform-frames:6")
    (expected,) = vlm.decode_together([state], 4)
    assert output[0, inputs["input_ids"].shape[1] :].tolist()[: len(expected)] == expected
    assert "6 of" in run.report.notes[0]
    assert run.report.sequences[0].kept_visual == 6


def test_rows_of_images_are_nan_and_text_is_not() -> None:
    model, processor = tiny_model("llava")
    inputs = turn("llava", 2)
    plan = "random-select:9"
    with torch.inference_mode(), ckv.compress(model, plan, processor=processor):
        states = model(**inputs, output_hidden_states=True)
    visual = inputs["input_ids"][0] == model.config.image_token_id
    for hidden in states.hidden_states:
        assert hidden[0, visual].isnan().all() and not hidden[0, ~visual].isnan().any()


def test_plain_text_is_the_plain_model() -> None:
    vlm, inputs = runner("llava"), turn("llava", 0)
    with torch.inference_mode():
        plain = vlm.model(**inputs).logits[0, -1]
    assert error(vlm.prefill(inputs, "rekv:9").logits[0], plain) <= 1e-5


def test_two_requests_decode_as_each_alone() -> None:
    vlm = runner("llava")
    plans, inputs = ["random-select:9", "quest:16", "rekv:9"], turn("llava", 2)
    alone = [vlm.decode_together([vlm.prefill(inputs, plan)], 4)[0] for plan in plans]
    together = vlm.decode_together([vlm.prefill(inputs, plan) for plan in plans], 4)
    assert together == alone


def test_a_fork_goes_its_own_way() -> None:
    vlm, inputs = runner("llava"), turn("llava", 2)
    state = vlm.prefill(inputs, "attention-select:9")
    other = type(state)(state.cache.fork(), state.logits, list(state.ids))
    question = turn("llava", 0, " And the blue one?", first=False)
    vlm.step([other], [9])
    one = vlm.extend(state, question)
    fresh = vlm.extend(vlm.prefill(inputs, "attention-select:9"), question)
    assert error(one.logits, fresh.logits) <= 1e-5


@pytest.mark.parametrize("method", ["random-select:9", "quest:16", "rekv:9"])
def test_an_error_leaves_the_request_as_it_was(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm, inputs = runner("llava"), turn("llava", 2)
    state, twin = vlm.prefill(inputs, method), vlm.prefill(inputs, method)
    question = turn("llava", 1, " And this?", seed=4, first=False)
    layer = vlm.model.model.language_model.layers[2]
    with monkeypatch.context() as patch:

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no")

        patch.setattr(layer.mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="no"):
            vlm.extend(state, question)
    vlm.step([state], [9])
    vlm.step([twin], [9])
    assert error(state.logits, twin.logits) <= 1e-5
    a, b = vlm.extend(state, question), vlm.extend(twin, question)
    assert error(a.logits, b.logits) <= 1e-5


def test_what_is_not_seen_does_not_matter() -> None:
    """Another picture in an image that is not chosen: the same answer."""
    vlm = runner("llava")
    inputs = turn("llava", 3)
    state = vlm.prefill(inputs, "uniform-frames:16")
    (unit,) = state.cache.retrieval.bank.unit[state.cache.retrieval.choice.tokens].unique().tolist()
    changed = dict(inputs)
    changed["pixel_values"] = inputs["pixel_values"].clone()
    changed["pixel_values"][(unit + 1) % 3] += 1.0
    assert error(vlm.prefill(changed, "uniform-frames:16").logits, state.logits) <= 1e-6
    changed["pixel_values"][unit] += 1.0
    assert error(vlm.prefill(changed, "uniform-frames:16").logits, state.logits) > 1e-4


def test_reported_bytes_are_the_entries_and_what_is_seen() -> None:
    vlm = runner("llava")
    state = vlm.prefill(turn("llava", 3), "random-select:16")
    report = state.report
    bank = state.cache.retrieval.bank
    held = sum(bank.entry(unit).nbytes for unit in range(3))
    assert report.bytes_by_kind["entries"] == held
    text = report.sequences[0].text
    per_token = report.full_bytes / report.sequences[0].tokens
    assert report.kv_bytes == (text + 16) * per_token


def test_what_cannot_be_done_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vlm, inputs = runner("llava"), turn("llava", 2)
    with pytest.raises(PlanError, match="take one of them"):
        vlm.prefill(inputs, "snapkv:0.5(window=4) + rekv:9")
    with pytest.raises(PlanError, match="depend on the question"):
        vlm.prefill(inputs, "rekv:9 + windowquant:3.17")
    with pytest.raises(PlanError, match="no text is kept"):
        vlm.prefill(inputs, "rekv:9 + rtn:4(of=prompt)")
    batch, _ = batch_and_singles("llava")
    with pytest.raises(PlanError, match="one prompt at a time"), ckv.compress(vlm.model, "rekv:9"):
        vlm.model(**batch)
    with pytest.raises(PlanError, match="pass processor="), ckv.compress(vlm.model, "rekv:9"):
        vlm.model(**inputs)
    with pytest.raises(PlanError, match="fit retoken"):
        vlm.prefill(inputs, "retoken:9")
    with pytest.raises(InputError, match="no artefact can be read"):
        vlm.prefill(inputs, "retoken:9(artefact=/nowhere/x.safetensors)")
    state = vlm.prefill(inputs, "rekv:9")
    with pytest.raises(PlanError, match="ask the question anew"):
        state.cache.crop(-1)
    ids = inputs["input_ids"]
    end = int(torch.nonzero(ids[0] == vlm.model.config.image_token_id)[-1]) + 1
    cut = {**inputs, "input_ids": ids[:, :end], "attention_mask": torch.ones(1, end)}
    with pytest.raises(InputError, match="ends with an image"):
        vlm.prefill(cut, "rekv:9")
    with pytest.raises(PlanError, match="causal full attention"):
        name = "llava-next-sliding"
        runner(name).prefill(turn(name, 1), "rekv:9")


def test_a_prompt_beyond_the_models_positions_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm, inputs = runner("llava"), turn("llava", 3)
    total = inputs["input_ids"].shape[1]
    config = vlm.model.config.get_text_config()
    monkeypatch.setattr(config, "max_position_embeddings", total - 10)
    with pytest.raises(InputError, match="too long"):
        vlm.prefill(inputs)
    with pytest.raises(InputError, match="too long"):
        vlm.prefill(inputs, "quest:16")
    assert torch.isfinite(vlm.prefill(inputs, "uniform-frames:16").logits).all()


@pytest.mark.parametrize("method", ["attention-select", "mean-similarity", "uniform-frames"])
def test_entries_may_stay_on_disk(method: str, tmp_path: Path) -> None:
    """The same answer; in memory is what ranks the images, and what the question sees."""
    vlm, inputs = runner("llava"), turn("llava", 3)
    plan, later = f"{method}:16", turn("llava", 0, " And the blue one?", first=False)
    store = ckv.Store(tmp_path, memory=0)
    state, twin = vlm.prefill(inputs, plan, store=store), vlm.prefill(inputs, plan)
    assert error(state.logits, twin.logits) <= 1e-5
    held = state.report.bytes_by_kind.get("entries", 0)
    assert held < 0.3 * twin.report.bytes_by_kind["entries"]
    assert error(vlm.extend(state, later).logits, vlm.extend(twin, later).logits) <= 1e-5
    # What is gone from the disk is computed again.
    store.clear()
    assert error(vlm.extend(state, later).logits, vlm.extend(twin, later).logits) <= 1e-5


def test_packed_entries_are_the_same_from_every_tier(tmp_path: Path) -> None:
    """Packed by the plan, by the store, or fetched and packed anew; smaller where they are held."""
    vlm, inputs = runner("llava"), turn("llava", 3)
    dense = vlm.prefill(inputs, "attention-select:16")
    asked = [
        vlm.prefill(inputs, "attention-select:16 + kivi:4"),
        vlm.prefill(inputs, "attention-select:16", store=ckv.Store(held="kivi:4")),
        vlm.prefill(inputs, "attention-select:16", store=ckv.Store(tmp_path, held="kivi:4")),
        vlm.prefill(inputs, "attention-select:16 + kivi:4", store=ckv.Store(tmp_path, memory=0)),
    ]
    assert error(asked[0].logits, dense.logits) > 1e-5
    asked += [
        vlm.prefill(inputs, "attention-select:16", store=state.cache.retrieval.shelf.store)
        for state in asked[1:3]
    ]
    for state in asked[1:]:
        assert error(state.logits, asked[0].logits) <= 1e-5
    (note,) = [note for note in asked[0].report.notes if "kivi:4" in note]
    assert "questions choose from" in note


def test_a_turn_is_undone_and_a_conversation_is_not_saved(tmp_path: Path) -> None:
    vlm = VLM(*tiny_model("llava"), "llava")
    pictures = [picture(28, 28, seed) for seed in range(3)]
    chat = vlm.session("attention-select:16")
    chat.ask("Where is the dog?", pictures, max_new_tokens=3)
    twin = chat.fork()
    chat.ask("And the red one?", max_new_tokens=3)
    chat.undo()
    one, other = (each.ask("And the blue one?", max_new_tokens=3) for each in (chat, twin))
    assert one.tokens == other.tokens
    with pytest.raises(InputError, match="is not saved"):
        chat.save(tmp_path / "chat")
