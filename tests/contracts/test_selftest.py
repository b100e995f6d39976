"""``VLM.selftest`` passes on every family, and tells when something is wrong."""

from __future__ import annotations

import pytest

from conduit_kv import VLM
from conduit_kv.engine import compress as engine
from tests.contracts.helpers import EVICT, fingerprint, plain_logits, turn
from tests.tiny import FAMILY_NAMES, tiny_model


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_it_passes_and_leaves_no_trace(family):
    model, processor = tiny_model(family)
    plain_logits(model, turn(family, 1))
    before = fingerprint(model)
    outcome = VLM(model, processor).selftest()
    assert outcome.passed, str(outcome)
    told = str(outcome)
    assert all(method in told for method in EVICT)
    assert "masked forward" in told and "needle" in told
    after = fingerprint(model)
    assert {k: v for k, v in after.items() if k[1] != "rope_deltas"} == {
        k: v for k, v in before.items() if k[1] != "rope_deltas"
    }


def test_it_fails_where_the_loop_is_wrong(monkeypatch):
    run_stack = engine.run_stack

    def wrong(*arguments, **options):
        output = run_stack(*arguments, **options)
        output.last_hidden_state = output.last_hidden_state * 1.01 + 0.01
        return output

    monkeypatch.setattr(engine, "run_stack", wrong)
    outcome = VLM(*tiny_model("llava")).selftest()
    assert not outcome.passed and "FAIL" in str(outcome)


def test_it_fails_where_evicted_tokens_are_still_seen(monkeypatch):
    from conduit_kv.cache import VisualLayer

    monkeypatch.setattr(VisualLayer, "keep", lambda *_: None)
    outcome = VLM(*tiny_model("llava")).selftest()
    failed = [check.name for check in outcome.checks if not check.passed]
    assert len(failed) == 1 and failed[0].endswith("equals a masked forward")
