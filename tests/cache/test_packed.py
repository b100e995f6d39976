"""Packed segments: attention, holes, batches, and what is freed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv.cache import Narrow, PackedSegment, Part, Quantised
from tests.contracts.helpers import examples

G, H, D = 2, 6, 16


def part(count, seed, first=0, heads=G, kind=4, start=0):
    """A part of shuffled tokens from ``start`` on."""
    random = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(heads, count, D, generator=random) for _ in range(2))
    index = start + torch.randperm(count, generator=random).int()
    store = Narrow.of(keys, values) if kind == "fp8" else Quantised.of(keys, values, kind)
    return Part(first, heads, index, store, torch.float32)


def expected(segment, query, row, scaling):
    """Output and log-sum-exp by plain loops over what the segment says it holds."""
    outputs, sums = [], []
    for head in range(H):
        keys, values = segment.read(row, head * G // H)
        if not len(keys):
            outputs.append(torch.zeros(query.shape[2], D))
            sums.append(torch.full((query.shape[2],), -torch.inf))
            continue
        logits = query[row, head] @ keys.T * scaling
        outputs.append(logits.softmax(-1) @ values)
        sums.append(logits.logsumexp(-1))
    return torch.stack(outputs), torch.stack(sums)


def check(segment, batch, n=1, seed=0):
    query = torch.randn(batch, H, n, D, generator=torch.Generator().manual_seed(seed))
    rows = torch.arange(1000, 1000 + n).expand(batch, n).int()
    output, lse = segment.attend(query, 0.3, rows, None, with_lse=True)
    for row in range(batch):
        wanted, sums = expected(segment, query, row, 0.3)
        assert torch.allclose(output[row], wanted, atol=1e-5)
        assert torch.allclose(lse[row], sums, atol=1e-5)


kinds = st.sampled_from([2, 3, 4, 8, "fp8"])


@given(kind=kinds, count=st.integers(1, 80), n=st.sampled_from([1, 3]), seed=st.integers(0, 9999))
@examples(20)
def test_attention_over_one_part(kind, count, n, seed):
    check(PackedSegment([[part(count, seed, kind=kind)]], G), 1, n, seed)


@given(
    kind=kinds, sizes=st.lists(st.integers(0, 50), min_size=2, max_size=3), seed=st.integers(0, 9)
)
@examples(12)
def test_attention_over_a_batch_of_different_sizes(kind, sizes, seed):
    if not any(sizes):
        sizes[0] = 3
    rows = [[part(size, seed + n, kind=kind)] if size else [] for n, size in enumerate(sizes)]
    check(PackedSegment(rows, G), len(sizes), 2, seed)


def test_attention_where_heads_hold_different_tokens():
    rows = [[part(40, 1, 0, 1), part(7, 2, 1, 1)], [part(33, 3, 1, 1)]]
    segment = PackedSegment(rows, G)
    assert not segment.heads_agree
    check(segment, 2, 1)
    assert len(segment.held(1, 0)) == 0 and len(segment.held(1, 1)) == 33


@given(kind=kinds, count=st.integers(2, 100), seed=st.integers(0, 9999), share=st.floats(0, 1))
@examples(25)
def test_what_is_dropped_leaves_holes_and_frees_units(kind, count, seed, share):
    before = PackedSegment([[part(count, seed, kind=kind)]], G)
    held = before.held(0, 0)
    kept = held[torch.rand(count, generator=torch.Generator().manual_seed(seed)) < share]
    after = before.keep([[kept.sort().values]])
    if after is None:
        assert len(kept) == 0
        return
    assert after.held(0, 0).tolist() == kept.tolist()  # in slot order
    where = {token: slot for slot, token in enumerate(held.tolist())}
    slots = [where[token] for token in kept.tolist()]
    for head in range(G):
        for mine, its in zip(after.read(0, head), before.read(0, head), strict=True):
            assert torch.equal(mine, its[slots])  # not a code has changed
    unit = 1 if kind == "fp8" else 32
    alive = {slot // unit for slot in slots}
    store = after.rows[0][0].store
    assert store.dense(torch.float32)[0].shape[1] == len(alive) * unit
    check(after, 1, 1)
    check(after, 1, 2)
    assert before.held(0, 0).tolist() == held.tolist()  # forks share: the old one is as it was


def test_heads_that_part_ways_are_cut_apart():
    segment = PackedSegment([[part(40, 5)]], G)
    after = segment.keep([[torch.arange(0, 20), torch.arange(10, 40)]])
    assert [len(after.held(0, head)) for head in range(G)] == [20, 30]
    check(after, 1)


def test_rows_are_shared_not_copied():
    segment = PackedSegment([[part(40, 1)], [part(20, 2)]], G)
    again = segment.select_rows(torch.tensor([1, 0, 0]))
    check(again, 3)
    assert again.rows[1][0] is again.rows[2][0] is segment.rows[0][0]
    used = sum(used for _, _, used in again.tensors())
    assert used == sum(used for _, _, used in segment.tensors())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_queries(dtype):
    segment = PackedSegment([[part(50, 1)]], G)
    query = torch.randn(1, H, 1, D, generator=torch.Generator().manual_seed(0))
    exact, _ = segment.attend(query, 0.3, torch.tensor([[99]]), None, with_lse=True)
    found, lse = segment.attend(query.to(dtype), 0.3, torch.tensor([[99]]), None, with_lse=True)
    assert found.dtype == dtype and lse.dtype == torch.float32
    assert torch.allclose(found.float(), exact, atol=0.05)
