"""A request that has ended holds nothing, at once: nobody waits for Python to look for cycles."""

from __future__ import annotations

import gc
import weakref

import pytest

from conduit_kv import VLM
from tests.tiny import FAMILY_NAMES, tiny_model
from tests.tiny.parts import picture

PLANS = (
    "full",
    "tgv-kv:0.5",
    "windowquant:3.17",
    "conduit:0.3",
    "random-select:5",
    "pdrop:0.6",
    "lightkv(layers=[2], windows=[1])",
    "nuwa-reduce:0.5",
)


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("plan", PLANS)
def test_nothing_outlives_a_request(name: str, plan: str) -> None:
    vlm = VLM(*tiny_model(name))
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What is it?"}]
    pictures = [picture(56, 56, seed) for seed in (1, 2)]
    inputs = vlm.process(vlm.render([{"role": "user", "content": content}]), pictures)
    gc.disable()
    try:
        state = vlm.prefill(inputs, plan)
        fork = type(state)(state.cache.fork(), state.logits, list(state.ids))
        vlm.decode_together([state, fork], 3)
        held = [weakref.ref(state.cache), weakref.ref(fork.cache)]
        del state, fork
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
