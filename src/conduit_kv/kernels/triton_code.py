"""The Triton program of :mod:`conduit_kv.kernels.gpu`; importing it needs Triton.

Its annotations are read by Triton, so that they cannot be postponed.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def codes(words, offset, place, plane, BITS, first):
    """Codes of one plane: bit ``place * plane`` of the words from ``first`` on."""
    bit = place * plane
    word = tl.load(words + offset + (first + bit // 32) * 16)
    return (word >> (bit % 32)) & ((1 << plane) - 1)


@triton.jit
def attend(
    query, keys, key_scales, values, value_scales, index, partial, sums,
    count, groups, per_split, scaling,
    HEADS: tl.constexpr, GROUP_HEADS: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, BITS: tl.constexpr,
    KEY_WORDS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    GROUP_TOKENS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    real = row < GROUP_HEADS
    channel = tl.arange(0, DEPTH)
    out_channel = tl.arange(0, WIDTH)
    place = (pair * GROUP_HEADS + row)[:, None]
    q = tl.load(query + place * DEPTH + channel[None, :], mask=real[:, None], other=0.0)
    q = q.to(tl.float32) * scaling
    most = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for block in range(split * per_split, (split + 1) * per_split):
        token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
        inside = token < groups * GROUP_TOKENS
        safe = tl.where(inside, token, 0)
        held = tl.load(index + safe, mask=token < count, other=-1) >= 0
        group = pair * groups + safe // GROUP_TOKENS

        # Keys: lane = token, a word holds channels.
        lane = (pair * groups * GROUP_TOKENS + safe) // LANE * (KEY_WORDS * LANE) + safe % LANE
        code = codes(keys, lane[:, None], channel[None, :], FIRST, BITS, 0)
        if SECOND > 0:
            start = (DEPTH * FIRST + 31) // 32
            code |= codes(keys, lane[:, None], channel[None, :], SECOND, BITS, start) << FIRST
        at = group[:, None] * (2 * DEPTH) + channel[None, :]
        scale = tl.load(key_scales + at).to(tl.float32)
        zero = tl.load(key_scales + at + DEPTH).to(tl.float32)
        k = code.to(tl.float32) * scale + zero
        logits = tl.dot(q, tl.trans(k), input_precision="ieee")
        logits = tl.where(held[None, :], logits, -1e30)
        highest = tl.maximum(most, tl.max(logits, 1))
        fade = tl.exp2(most - highest)
        weight = tl.where(held[None, :], tl.exp2(logits - highest[:, None]), 0.0)
        total = total * fade + tl.sum(weight, 1)
        most = highest

        # Values: lane = channel, a word holds tokens.
        inner = safe % GROUP_TOKENS
        tile = group[:, None] * (WIDTH // LANE) + out_channel[None, :] // LANE
        lane2 = tile * (BITS * LANE) + out_channel[None, :] % LANE
        code2 = codes(values, lane2, inner[:, None], FIRST, BITS, 0)
        if SECOND > 0:
            code2 |= codes(values, lane2, inner[:, None], SECOND, BITS, FIRST) << FIRST
        parts: tl.constexpr = (WIDTH + GROUP_TOKENS - 1) // GROUP_TOKENS
        part = group[:, None] * parts + out_channel[None, :] // GROUP_TOKENS
        at2 = part * (2 * GROUP_TOKENS) + inner[:, None]
        scale2 = tl.load(value_scales + at2).to(tl.float32)
        zero2 = tl.load(value_scales + at2 + GROUP_TOKENS).to(tl.float32)
        v = code2.to(tl.float32) * scale2 + zero2
        found = found * fade[:, None] + tl.dot(weight, v, input_precision="ieee")
    place = (split * HEADS + pair * GROUP_HEADS + row)[:, None]
    tl.store(partial + place * WIDTH + out_channel[None, :], found, mask=real[:, None])
    where = (split * HEADS + pair * GROUP_HEADS + row) * 2
    tl.store(sums + where, most, mask=real)
    tl.store(sums + where + 1, total, mask=real)
