"""Codes: really packed, within half a step, and read back as a slow reference reads them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv import ModelError
from conduit_kv.cache import Narrow, Quantised, codec
from tests.contracts.helpers import examples


def slow(group: list[float], bits: int) -> list[float]:
    """One group of numbers, quantised and read back in plain arithmetic."""
    half = lambda x: float(torch.tensor(x, dtype=torch.float16))  # noqa: E731
    zero = half(min(group))
    scale = half((max(group) - zero) / (2**bits - 1))
    if scale <= 0:
        return [zero for _ in group]
    codes = [min(max(round((x - zero) / scale), 0), 2**bits - 1) for x in group]
    return [zero + scale * code for code in codes]


def numbers(rows: int, tokens: int, width: int, seed: int) -> torch.Tensor:
    """Normal numbers with an outlier channel, a constant one and one far from zero."""
    x = torch.randn(rows, tokens, width, generator=torch.Generator().manual_seed(seed))
    x[..., seed % width] *= 40
    x[..., (seed + 1) % width] = 0.7
    x[..., (seed + 2) % width] += 25
    return x


shapes = {
    "bits": st.sampled_from(codec.BITS),
    "tokens": st.integers(1, 70),
    "width": st.sampled_from([8, 16, 40, 64]),
    "seed": st.integers(0, 10**6),
}


@given(**shapes)
@examples(25)
def test_keys_are_read_back_as_the_slow_reference_says(bits, tokens, width, seed):
    x = numbers(2, tokens, width, seed)
    found = codec.decode_by_channel(*codec.encode_by_channel(x, bits), bits)[:, :tokens]
    for row in range(2):
        for channel in range(width):
            for start in range(0, tokens, codec.GROUP):
                group = x[row, start : start + codec.GROUP, channel]
                expected = torch.tensor(slow(group.tolist(), bits))
                mine = found[row, start : start + codec.GROUP, channel]
                step = (group.max() - group.min()) / (2**bits - 1)
                # Numbers half-way between two levels may go either way.
                ties = (mine - expected).abs() > 1e-5 * (1 + group.abs().max())
                assert ((mine - group).abs()[ties] <= 0.51 * step + 0.02).all()
                assert ties.float().mean() < 0.2


@given(**shapes)
@examples(25)
def test_values_are_read_back_as_the_slow_reference_says(bits, tokens, width, seed):
    x = numbers(1, tokens, width, seed)
    found = codec.decode_by_token(*codec.encode_by_token(x, bits), bits, width)[:, :tokens]
    for token in range(tokens):
        for start in range(0, width, codec.GROUP):
            group = x[0, token, start : start + codec.GROUP]
            expected = torch.tensor(slow(group.tolist(), bits))
            mine = found[0, token, start : start + codec.GROUP]
            ties = (mine - expected).abs() > 1e-5 * (1 + group.abs().max())
            step = (group.max() - group.min()) / (2**bits - 1)
            assert ((mine - group).abs()[ties] <= 0.51 * step + 0.02).all()
            assert ties.float().mean() < 0.2


@given(**shapes)
@examples(40)
def test_errors_are_at_most_half_a_step(bits, tokens, width, seed):
    x = numbers(2, tokens, width, seed)
    for dim, found in (
        (1, codec.decode_by_channel(*codec.encode_by_channel(x, bits), bits)[:, :tokens]),
        (2, codec.decode_by_token(*codec.encode_by_token(x, bits), bits, width)[:, :tokens]),
    ):
        for part, mine in zip(x.split(32, dim), found.split(32, dim), strict=True):
            span = part.amax(dim, keepdim=True) - part.amin(dim, keepdim=True)
            stored = 2**-10 * (part.abs().amax(dim, keepdim=True) + span)  # fp16 zero and scale
            assert ((mine - part).abs() <= span / (2**bits - 1) / 2 + stored + 1e-6).all()
            # Constant groups are exact up to the 16 bits of their zero.
            constant = (span == 0).expand_as(part)
            assert ((mine - part).abs()[constant] <= 2**-11 * part.abs()[constant] + 1e-7).all()


@pytest.mark.parametrize("bits", codec.BITS)
@pytest.mark.parametrize("width", [32, 64, 128])
def test_codes_are_really_packed(bits, width):
    """A payload bit is a bit in memory, and a group of 32 numbers costs 32 bits for its scales."""
    store = Quantised.of(torch.randn(3, 96, width), torch.randn(3, 96, width), bits)
    held = {"keys": 0, "values": 0, "scales": 0}
    for kind, tensor in store.tensors():
        held[kind] += tensor.untyped_storage().nbytes()
    assert held["keys"] == held["values"] == 3 * 96 * width * bits // 8
    assert held["scales"] == 2 * 3 * 96 * width * 32 // 32 // 8
    assert codec.payload_bits(bits, width) == bits


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), 1e6])
@pytest.mark.parametrize("number", range(2))
def test_what_is_not_finite_is_refused(bad, number):
    pair = [torch.randn(1, 8, 16), torch.randn(1, 8, 16)]
    pair[number][0, 3, 5] = bad
    with pytest.raises(ModelError, match="not finite"):
        Quantised.of(*pair, 4)
    if bad == bad and abs(bad) == float("inf"):
        with pytest.raises(ModelError, match="not finite"):
            Narrow.of(*pair)


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 90))
@examples(20)
def test_attention_comes_closer_with_every_bit(seed, tokens):
    """Error of the attention output against fp32, with an outlier channel in K."""
    random = torch.Generator().manual_seed(seed)
    keys, values = numbers(1, tokens, 32, seed), numbers(1, tokens, 32, seed + 7)
    query = torch.randn(1, 4, 32, generator=random)
    query[..., seed % 32] /= 40

    def attend(k, v):
        return (query @ k.transpose(1, 2) * 32**-0.5).softmax(-1) @ v

    exact = attend(keys, values)
    errors = []
    for bits in (2, 4, 8):
        k, v = Quantised.of(keys, values, bits).dense(torch.float32)
        errors.append(float((attend(k[:, :tokens], v[:, :tokens]) - exact).norm() / exact.norm()))
    assert errors[2] <= errors[1] + 0.01 and errors[1] <= errors[0] + 0.05
    assert errors[2] < 0.03 and errors[1] < 0.3


def test_keys_by_channel_bear_an_outlier_that_keys_by_token_do_not():
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0))
    x[..., 3] = 60 + torch.arange(64) % 3
    by_channel, by_token = (
        Quantised.of(x, x, 4, way).dense(torch.float32)[0] for way in ("channel", "token")
    )
    others = torch.arange(32) != 3
    error = [float((k - x)[..., others].abs().mean()) for k in (by_channel, by_token)]
    assert error[0] < 0.2 < 0.5 < error[1]
