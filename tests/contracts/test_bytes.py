"""Contract 4: reported bytes are the bytes really allocated, and what is evicted is freed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from conduit_kv import VLM, Store, compress
from conduit_kv.cache import VisualLayer
from conduit_kv.cache.capsule import BlockParts
from conduit_kv.engine.report import Report
from conduit_kv.families import Family
from conduit_kv.plan import Plan
from tests.contracts.helpers import (
    EVICT,
    as_it_was,
    batch_and_singles,
    converse,
    held,
    plan_of,
    sampled,
    tokens,
    turn,
)
from tests.contracts.test_reference import conversation
from tests.tiny import FAMILY_NAMES, tiny_model

FLOAT = 4
SHARED = (nn.Module, Plan, Family, Store, BlockParts, type)
"""What a cache refers to without holding it for its request: code, a store of images, what was
learned for a model."""


def reachable(thing) -> int:
    """Bytes of all distinct storages that can be reached from ``thing``."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        current = waiting.pop()
        if id(current) in seen or isinstance(current, SHARED):
            continue
        seen.add(id(current))
        if isinstance(current, Tensor):
            storage = current.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(current, dict):
            waiting += [*current.keys(), *current.values()]
        elif isinstance(current, list | tuple | set | frozenset):
            waiting += list(current)
        elif hasattr(current, "__dict__") and not callable(current):
            waiting += list(vars(current).values())
    return sum(storages.values())


def check(cache):
    report = Report.of(cache)
    assert report.kv_allocated_bytes == reachable(cache)
    assert report.kv_allocated_bytes == sum(report.bytes_by_kind.values())
    wanted = 0
    for row in range(cache.progress.batch):
        for layer, heads in zip(cache, held(cache, row), strict=True):
            width = layer.tail.keys.shape[3] + layer.tail.values.shape[3]
            wanted += sum(len(head) for head in heads) * width * FLOAT
    assert report.kv_bytes == wanted
    assert report.kv_bytes <= report.bytes_by_kind["keys"] + report.bytes_by_kind["values"]


@pytest.mark.parametrize("method", EVICT)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_reported_bytes_are_those_reachable(family, method):
    model, _ = tiny_model(family)
    parts = conversation(family)
    run = converse(model, plan_of(method, 0.4), parts[:1])
    check(run.cache)
    for part in parts[1:]:
        converse(model, plan_of(method, 0.4), [part], cache=run.cache)
    check(run.cache)


@pytest.mark.parametrize("options", [("cover=0.5", "cover_by=features"), ("of=visual",)])
@pytest.mark.parametrize("method", ["h2o", "ada-kv", "tgv-kv", "knorm"])
def test_what_a_method_remembers_is_counted(method, options):
    model, _ = tiny_model("qwen3-vl")
    run = converse(model, plan_of(method, 0.4, *options), conversation("qwen3-vl"))
    check(run.cache)


@pytest.mark.parametrize(("family", "method"), sampled(1))
def test_a_batch_and_its_beams_count_no_padding(family, method):
    model, _ = tiny_model(family)
    batch, singles = batch_and_singles(family)
    plan = plan_of(method, 0.4)
    with as_it_was(model), compress(model, plan) as run:
        model(**batch)
        check(run.cache)
        alone = []
        whole = Report.of(run.cache).kv_bytes
        for inputs in singles:
            model(**inputs)
            alone.append(Report.of(run.cache).kv_bytes)
        assert whole == sum(alone)
        model.generate(**batch, num_beams=2, max_new_tokens=3)
        check(run.cache)


def test_a_cropped_cache_counts_what_is_left():
    model, _ = tiny_model("qwen2-vl")
    run = converse(model, "full", [turn("qwen2-vl", 2), tokens(70), tokens(71)])
    before = Report.of(run.cache).kv_bytes
    run.cache.crop(-2)
    check(run.cache)
    assert Report.of(run.cache).kv_bytes == before * (run.steps[-1].stop - 2) // run.steps[-1].stop


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_bytes_are_those_of_kv_heads(family):
    """Two KV heads serve four query heads: nothing is repeated before it is stored."""
    model, _ = tiny_model(family)
    config = model.config.get_text_config()
    run = converse(model, "full", [turn(family, 1)])
    per_token = 4 * config.num_key_value_heads * (config.hidden_size // 4) * 2 * FLOAT
    report = Report.of(run.cache)
    assert report.kv_bytes == report.full_bytes == per_token * run.cache.get_seq_length()


@pytest.mark.parametrize("rows", [1, 3])
def test_heads_that_keep_different_numbers_take_less(rows):
    model, _ = tiny_model("llava-next")
    inputs, _ = batch_and_singles("llava-next", (1, 2, 1)[:rows])
    with as_it_was(model), compress(model, "ada-kv:0.4(window=4)") as run:
        model(**inputs)
    sizes = [[len(head) for head in heads] for row in range(rows) for heads in held(run.cache, row)]
    padded = sum(2 * max(heads) for heads in sizes) * 16 * FLOAT
    exact = sum(sum(heads) for heads in sizes) * 16 * FLOAT
    assert exact < 0.95 * padded
    ragged = [layer for layer in run.cache if layer.frozen]
    assert len(ragged) >= 3
    allocated = Report.of(run.cache).bytes_by_kind["keys"]
    assert allocated == exact or (rows > 1 and exact <= allocated < padded)


@pytest.mark.parametrize("method", ["ada-kv", "h2o", "look-m", "tgv-kv"])
def test_what_is_evicted_is_freed(method, monkeypatch):
    """The buffers of the whole prompt die with the call."""
    model, _ = tiny_model("llava-next")
    buffers: list[weakref.ref] = []
    keep = VisualLayer.keep

    def watched(self, *arguments):
        buffers.append(weakref.ref(self.tail))
        buffers.append(weakref.ref(self.tail._keys.untyped_storage()))
        keep(self, *arguments)

    monkeypatch.setattr(VisualLayer, "keep", watched)
    plan = plan_of(method, 0.3)
    first, second = turn("llava-next", 1), turn("llava-next", 1, first=False)
    run = converse(model, plan, [first])
    gc.collect()
    assert len(buffers) == 8 and not any(ref() for ref in buffers)
    whole = Report.of(run.cache).full_bytes
    assert reachable([layer.tensors() and vars(layer) for layer in run.cache]) < 0.5 * whole
    converse(model, plan, [second], cache=run.cache)
    gc.collect()
    assert len(buffers) == 16 and not any(ref() for ref in buffers)


def test_a_request_dies_with_its_last_reference():
    model, processor = tiny_model("qwen3-vl")
    vlm = VLM(model, processor)
    state = vlm.prefill(turn("qwen3-vl", 1), "tgv-kv:0.4(cover=0.5, cover_by=features)")
    vlm.step([state], [70])
    watched = [weakref.ref(state.cache), *(weakref.ref(layer) for layer in state.cache)]
    del state
    gc.collect()
    assert not any(ref() for ref in watched)


def test_slack_is_bounded():
    """What decoding allocates in advance is a small part, and grows with what is held."""
    model, _ = tiny_model("llava")
    run = converse(model, "full", [turn("llava", 1), *(tokens(70) for _ in range(90))])
    used, allocated = run.cache.bytes_in_use(), run.cache.bytes_allocated()
    slots = allocated["keys"] / used["keys"] * run.cache.get_seq_length()
    assert run.cache.get_seq_length() <= slots <= 1.25 * run.cache.get_seq_length() + 64
    assert torch.equal(run.cache.held(0), torch.arange(run.cache.get_seq_length()))
