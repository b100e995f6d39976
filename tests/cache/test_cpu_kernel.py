"""The CPU decode kernel against plain PyTorch over the same codes."""

from __future__ import annotations

import pytest
import torch

from conduit_kv.cache import PackedSegment, Part, Quantised
from conduit_kv.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="llvmlite is not installed")

CASES = [
    # bits, tokens, head size of K and V, KV heads, query heads of each
    (2, 7, 64, 64, 3, 3),
    (2, 1030, 64, 32, 1, 1),
    (3, 300, 64, 64, 2, 3),
    (3, 65, 48, 80, 1, 2),
    (4, 513, 128, 128, 2, 4),
    (4, 31, 16, 16, 2, 2),
    (8, 96, 32, 64, 1, 7),
    (8, 700, 80, 80, 2, 1),
]


def pair(bits, tokens, depth, width, pairs, group, seed=0):
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(pairs, tokens, depth, generator=random) * 2
    keys[..., 3] += 9
    values = torch.randn(pairs, tokens, width, generator=random)
    query = torch.randn(1, pairs * group, 1, depth, generator=random)
    return Quantised.of(keys, values, bits), query


def slow(store, query, index, scaling):
    keys, values = (x[:, : len(index)].double() for x in store.dense(torch.float32))
    group = query.shape[1] // len(keys)
    q = query[0, :, 0].double().view(len(keys), group, -1)
    logits = (q @ keys.transpose(1, 2) * scaling).masked_fill(index < 0, -torch.inf)
    return (logits.softmax(-1) @ values).flatten(0, 1), logits.logsumexp(-1).flatten()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_attention_over_the_numbers(case, threads):
    store, query = pair(*case)
    index = torch.arange(case[1], dtype=torch.int32)
    index[:: max(2, case[1] // 5)] = -1
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        output, lse = store.attend(query, 0.2, index)
    finally:
        torch.set_num_threads(before)
    wanted, sums = slow(store, query, index, 0.2)
    assert (output[0, :, 0] - wanted).abs().max() < 2e-5
    assert (lse[0, :, 0] - sums).abs().max() < 2e-5


def test_large_scores_neither_overflow_nor_vanish():
    store, query = pair(4, 600, 64, 64, 1, 3)
    index = torch.arange(600, dtype=torch.int32)
    for factor in (1e-6, 50.0):
        output, lse = store.attend(query * factor, 1.0, index)
        wanted, sums = slow(store, query * factor, index, 1.0)
        assert (output[0, :, 0] - wanted).abs().max() < 1e-3
        assert ((lse[0, :, 0] - sums) / (1 + sums.abs())).abs().max() < 1e-5


def test_a_whole_block_of_holes_weighs_nothing():
    store, query = pair(2, 600, 64, 64, 1, 3)
    index = torch.arange(600, dtype=torch.int32)
    index[:300] = -1
    output, _ = store.attend(query, 0.3, index)
    assert (output[0, :, 0] - slow(store, query, index, 0.3)[0]).abs().max() < 2e-5


def test_what_it_cannot_do_goes_to_pytorch(monkeypatch):
    many, query = pair(4, 40, 16, 16, 1, 9)  # more query heads than registers
    index = torch.arange(40, dtype=torch.int32)
    assert many.attend(query, 0.2, index) is None
    output, _ = Part(0, 1, index, many, torch.float32).attend(query, 0.2, torch.tensor([[99]]))
    assert (output[0, :, 0] - slow(many, query, index, 0.2)[0]).abs().max() < 2e-5
    store, query = pair(4, 40, 16, 16, 1, 3)
    monkeypatch.setattr(cpu, "_llvm", lambda: None)
    assert store.attend(query, 0.2, index) is None
    segment = PackedSegment([[Part(0, 1, index, store, torch.float32)]], 1)
    found, _ = segment.attend(query, 0.2, torch.tensor([[99]]), None, with_lse=True)
    assert (found[0, :, 0] - slow(store, query, index, 0.2)[0]).abs().max() < 2e-5
