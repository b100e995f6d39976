"""Any two methods of different stages run together, each to its effect, or are refused at once."""

from __future__ import annotations

import itertools

import pytest
import torch

from conduit_kv import VLM, PlanError, Store
from conduit_kv.cache import PackedSegment
from conduit_kv.engine.report import Report
from conduit_kv.methods.base import STAGES, registry
from tests.contracts.helpers import EVICT, as_it_was, plan_of, same_held
from tests.contracts.helpers import held as tokens_held
from tests.contracts.test_bytes import reachable
from tests.tiny import FAMILY_NAMES, tiny_model
from tests.tiny.parts import picture

_BUDGETS = {"reuse": "0.3", "reduce": "0.6", "route": "0.6", "retrieve": "9", "hold": "4"}
_AS_WRITTEN = {
    "fp8": "fp8",
    "kivi": "kivi:4(residual=0)",
    "lightkv": "lightkv(layers=[2], windows=[1])",
    "quest": "quest:9(page=3)",
    "reuse-all": "reuse-all",
    "stride-interpolate": "stride-interpolate:0.5(block=4)",
}
# What is learned for one model and refused for any other: composed in the tests of each.
_LEARNED = ("kvcapsule", "pca", "retoken")


def _written(name: str) -> str:
    if name in EVICT:
        return plan_of(name, 0.6, "of=visual")
    return _AS_WRITTEN.get(name, f"{name}:{_BUDGETS[registry()[name].stage]}")


NAMES = [name for name in sorted(registry()) if name not in (*_LEARNED, "full")]
PAIRS = [
    (first, second)
    for first, second in itertools.combinations(
        sorted(NAMES, key=lambda name: STAGES.index(registry()[name].stage)), 2
    )
    if registry()[first].stage != registry()[second].stage
]


def _effect(stage: str, cache) -> bool:
    """Whether a stage did to a request what it is there for."""
    (sequence,) = Report.of(cache).sequences
    visual = sum(sequence.images)
    if stage in ("reduce", "route"):
        return sequence.active_visual < visual
    if stage == "reuse":
        return cache.reuse.usage.image_tokens == visual
    if stage == "retrieve":
        return cache.retrieval.choice is not None
    if stage == "hold" and cache.retrieval is not None:
        return any("questions choose from" in note for note in cache.retrieval.notes)
    if stage == "hold":
        return any(isinstance(s, PackedSegment) for layer in cache for s in layer.frozen)
    ran = sequence.text * len(sequence.layers) + sum(layer.active for layer in sequence.layers)
    return sequence.kept * len(sequence.layers) < ran


def _ask(vlm: VLM, plan: str, store: Store):
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Where is the dog?"}]
    pictures = [picture(56, 56, seed) for seed in (1, 2)]
    inputs = vlm.process(vlm.render([{"role": "user", "content": content}]), pictures)
    return vlm.prefill(inputs, plan, store=store)


@pytest.mark.parametrize(("number", "pair"), enumerate(PAIRS), ids=[" + ".join(p) for p in PAIRS])
def test_two_methods_work_together_or_say_why_not(number, pair):
    vlm = VLM(*tiny_model(FAMILY_NAMES[number % len(FAMILY_NAMES)]))
    store = Store(memory="64MB")
    first, second = (_written(name) for name in pair)
    try:
        state = _ask(vlm, f"{first} + {second}", store)
    except PlanError as refused:
        # Both are named, and it is known before anything has run or been stored.
        assert all(name in str(refused) for name in pair)
        assert not any(store.nbytes_by_tier().values())
        return
    cache = state.cache
    report = Report.of(cache)
    for name in pair:
        said = any(note.startswith(name) and "left alone" in note for note in report.notes)
        assert _effect(registry()[name].stage, cache) or said, f"{name} had no effect"
    assert report.kv_allocated_bytes == reachable(cache)
    again = _ask(vlm, f"{second} + {first}", store)
    assert same_held(tokens_held(cache), tokens_held(again.cache))
    assert torch.equal(state.logits, again.logits)
    with as_it_was(vlm.model):
        tokens, same = vlm.decode_together([state, again], 3)
    assert tokens == same
