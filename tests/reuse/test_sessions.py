"""Sessions with a store: new images at any turn, forks, undo, files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from conduit_kv import VLM, InputError, PlanError, Store, compress
from conduit_kv.engine.session import Session
from tests.tiny import tiny_model
from tests.tiny.parts import picture

PLANS = ("full", "conduit:0.2", "conduit:0.2 + tgv-kv:0.6", "h2o:0.5", "ada-kv:0.5(window=4)")


def vlm_of(name: str = "qwen2.5-vl") -> VLM:
    return VLM(*tiny_model(name), name=name)


def turns(session: Session, count: int, start: int = 0) -> list[tuple[int, ...]]:
    questions = ["What is this?", "Where is the dog?", "Describe that please.", "And red?"]
    images = [
        [picture(28, 42, 1)],
        [],
        [picture(42, 28, 2), picture(28, 42, 3)],
        [picture(28, 42, 1)],
    ]
    return [
        session.ask(questions[n], images[n], max_new_tokens=4).tokens
        for n in range(start, start + count)
    ]


@pytest.mark.parametrize("name", ("llava", "qwen2.5-vl", "smolvlm"))
def test_a_new_image_in_a_later_turn_invalidates_nothing(name: str) -> None:
    vlm, store = vlm_of(name), Store()
    session = vlm.session("conduit:0.2", store=store)
    turns(session, 3)
    usage = session.report.reuse
    assert usage is not None
    assert usage.cached_image_tokens == 0
    assert usage.computed_tokens == usage.image_tokens
    before = usage.image_tokens
    turns(session, 1, start=3)  # the first turn's image again
    usage = session.report.reuse
    assert usage is not None
    assert usage.cached_image_tokens == usage.image_tokens - before > 0
    other = vlm.session("conduit:0.2", store=store)
    turns(other, 1)
    assert other.report.reuse is not None
    assert other.report.reuse.computed_tokens == 0


@pytest.mark.parametrize("plan", ("tgv-kv:0.6", "conduit:1.0"))
def test_a_store_that_a_plan_would_not_look_at_is_refused(plan: str) -> None:
    vlm = vlm_of()
    with pytest.raises(PlanError, match="reuses no images"):
        vlm.session(plan, store=Store())
    with pytest.raises(PlanError, match="reuses no images"):
        vlm.prefill({}, plan, store=Store())
    with (
        pytest.raises(PlanError, match="reuses no images"),
        compress(vlm.model, plan, store=Store()),
    ):
        pass


@pytest.mark.parametrize("plan", PLANS)
def test_forks_go_their_own_ways_and_undo_goes_back(plan: str) -> None:
    vlm = vlm_of()
    session = vlm.session(plan)
    turns(session, 2)
    fork = session.fork()
    third = turns(session, 1, start=2)
    assert turns(fork, 1, start=2) == third
    session.undo()
    assert turns(session, 1, start=2) == third
    session.undo()
    with pytest.raises(InputError, match="no turn"):
        session.undo()
    # Another turn instead, as if the undone one had never been.
    assert turns(session, 1, start=3) == turns(_after(vlm, plan, 2), 1, start=3)


def _after(vlm: VLM, plan: str, count: int) -> Session:
    session = vlm.session(plan)
    turns(session, count)
    return session


def test_the_first_turn_can_be_undone() -> None:
    session = vlm_of().session("conduit:0.2")
    first = turns(session, 1)
    session.undo()
    assert session.state is None
    assert turns(session, 1) == first


@pytest.mark.parametrize("plan", (*PLANS, "kivi:4", "uniform:0.5 + rtn:8"))
def test_saved_and_loaded_goes_on_as_if_it_had_stayed(plan: str, tmp_path: Path) -> None:
    vlm = vlm_of()
    session = vlm.session(plan)
    turns(session, 2)
    path = tmp_path / "chat"
    session.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = vlm.load_session(path)
    assert other.messages == session.messages
    assert other.report.kv_bytes == session.report.kv_bytes
    assert other.nbytes["cache"] <= session.nbytes["cache"] * 1.05
    for start in (2, 3):
        assert turns(other, 1, start=start) == turns(session, 1, start=start)
    assert session.state is not None
    assert other.state is not None
    assert torch.equal(session.state.logits, other.state.logits)


def test_a_file_that_is_damaged_or_of_another_model_is_refused(tmp_path: Path) -> None:
    vlm = vlm_of()
    session = vlm.session("conduit:0.2")
    path = tmp_path / "chat"
    with pytest.raises(InputError, match="nothing"):
        session.save(path)
    turns(session, 1)
    session.save(path)
    with pytest.raises(InputError, match="other weights"):
        vlm_of("llava").load_session(path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        vlm.load_session(path)
    path.write_bytes(data[:100])
    with pytest.raises(InputError, match="damaged"):
        vlm.load_session(path)
    with pytest.raises(InputError, match="cannot be read"):
        vlm.load_session(tmp_path / "nothing")
    with pytest.raises(InputError, match="cannot be written"):
        session.save(tmp_path / "no folder" / "chat")


def test_bytes_are_those_of_the_cache_and_of_the_copy_to_go_back_to() -> None:
    vlm = vlm_of()
    adds, lets_go = vlm.session("conduit:0.2"), vlm.session("h2o:0.5")
    for session in (adds, lets_go):
        turns(session, 2)
        assert session.state is not None
        assert session.nbytes["cache"] == sum(session.state.cache.bytes_allocated().values())
    assert adds.nbytes["undo"] == 0
    assert lets_go.nbytes["undo"] > 0


def test_tenants_share_nothing() -> None:
    vlm = vlm_of()
    one = Store(tenant="one")
    turns(vlm.session("conduit:0.2", store=one), 1)
    both = Store(tenant="two")
    both.memory = one.memory
    session = vlm.session("conduit:0.2", store=both)
    turns(session, 1)
    assert session.report.reuse is not None
    assert session.report.reuse.cached_image_tokens == 0


def test_the_report_says_where_images_came_from(tmp_path: Path) -> None:
    vlm = vlm_of()
    turns(vlm.session("conduit:0.2", store=Store(tmp_path)), 1)
    session = vlm.session("conduit:0.2 + tgv-kv:0.6", store=Store(tmp_path))
    turns(session, 1)
    report = session.report
    assert report.usage["cached_tokens"] == report.usage["image_tokens"] > 0
    assert 0 < report.usage["refreshed_tokens"] < report.usage["image_tokens"]
    assert report.usage["kept_tokens"] < report.usage["prompt_tokens"]
    assert report.store_bytes["disk"] > 0
    text = str(report)
    assert "from disk" in text
    assert "computed again" in text


@pytest.mark.parametrize("plan", ("conduit:0.2 + fastv:0.5", "reuse-all + divprune:0.5"))
def test_plans_that_cannot_be_combined_say_so(plan: str) -> None:
    with pytest.raises(PlanError, match="leave one of them out"):
        turns(vlm_of().session(plan), 1)
