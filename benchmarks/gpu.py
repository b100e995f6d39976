"""Decode attention over packed caches on a GPU, in one table: under eight minutes.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json

For 8k to 128k cached tokens, head sizes 64 and 128 and 1, 4 or 7 query heads per KV head: the
Triton kernel at 2, 4, 8 and mixed bits against SDPA and, where PyTorch has it, FlashAttention on
bf16. Beside each time stand the bytes that were read over it and the device's copy bandwidth. Every
kernel is first checked against plain PyTorch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from conduit_kv.attention.merge import merge_parts
from conduit_kv.cache import Quantised
from conduit_kv.kernels import gpu

TOKENS = (8192, 32768, 131072)
WIDTHS = (64, 128)
GROUPS = (1, 4, 7)
KV_HEADS = 8
MIXED = ((2, 0.715), (4, 0.235), (8, 0.05))
"""Shares of the tokens by bits: WindowQuant near an average of 3 bits."""


def milliseconds(run: Callable[[], Any], limit: float = 0.25) -> float:
    """Median of repeated runs, each timed by the device."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times, end = [], time.monotonic() + limit
    while time.monotonic() < end or len(times) < 5:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def copy_bandwidth() -> float:
    """GB/s of a copy on the device, reading and writing counted."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6


def stores(tokens: int, width: int, bits: int | str) -> list[tuple[Quantised, Tensor]]:
    shares = MIXED if bits == "mixed" else ((int(bits), 1.0),)
    found = []
    for level, share in shares:
        count = max(32, int(tokens * share) // 32 * 32)
        keys, values = (
            torch.randn(KV_HEADS, count, width, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        index = torch.arange(count, dtype=torch.int32, device="cuda")
        found.append((Quantised.of(keys, values, level), index))
    return found


def attend(query: Tensor, packed: list[tuple[Quantised, Tensor]], scaling: float) -> Tensor:
    parts = [
        gpu.decode(
            query,
            store.keys,
            store.key_scales,
            store.values,
            store.value_scales,
            index,
            store.bits,
            store.widths[1],
            scaling,
        )
        for store, index in packed
    ]
    return merge_parts([(output[None, :, None], lse[None, :, None]) for output, lse in parts])


def check(query: Tensor, packed: list[tuple[Quantised, Tensor]], scaling: float) -> float:
    pairs = [store.dense(torch.float32) for store, _ in packed]
    keys, values = (torch.cat([pair[n] for pair in pairs], 1) for n in (0, 1))
    rows = query.float().view(KV_HEADS, -1, query.shape[-1])
    wanted = (rows @ keys.transpose(1, 2) * scaling).softmax(-1) @ values
    found = attend(query, packed, scaling).float()[0, :, 0]
    return float((found - wanted.flatten(0, 1)).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, action="append")
    options = parser.parse_args()
    if not (torch.cuda.is_available() and gpu.available()):
        raise SystemExit("this needs a CUDA device and Triton")
    torch.manual_seed(0)
    started, bandwidth = time.monotonic(), copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies at {bandwidth:.0f} GB/s")
    rows: list[dict[str, Any]] = []
    for tokens in options.tokens or TOKENS:
        for width in WIDTHS:
            keys, values = (
                torch.randn(1, KV_HEADS, tokens, width, device="cuda", dtype=torch.bfloat16)
                for _ in range(2)
            )
            packed = {bits: stores(tokens, width, bits) for bits in (2, 4, 8, "mixed")}
            for group in GROUPS:
                heads, scaling = KV_HEADS * group, width**-0.5
                query = torch.randn(heads, width, device="cuda", dtype=torch.bfloat16)
                one = query[None, :, None]

                def dense(one: Tensor = one, k: Tensor = keys, v: Tensor = values) -> Tensor:
                    return scaled_dot_product_attention(one, k, v, enable_gqa=True)

                def flash(run: Callable[[], Tensor] = dense) -> Tensor:
                    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                        return run()

                size = 2 * KV_HEADS * tokens * width * 2
                row: dict[str, Any] = {"tokens": tokens, "width": width, "group": group}
                row["sdpa_ms"] = milliseconds(dense)
                try:
                    row["flash_ms"] = milliseconds(flash)
                except RuntimeError as error:
                    row["flash_ms"], row["flash_error"] = None, str(error).splitlines()[0]
                for bits, held in packed.items():
                    error = check(query, held, scaling)
                    if error > 2e-2:
                        raise SystemExit(f"{row}, {bits} bits: wrong by {error}")
                    spent = milliseconds(lambda q=query, h=held, s=scaling: attend(q, h, s))
                    read = sum(
                        t.numel() * t.element_size()
                        for store, _ in held
                        for _, t in store.tensors()
                    )
                    row[f"{bits}_ms"], row[f"{bits}_gbs"] = spent, read / spent / 1e6
                    row[f"{bits}_smaller"] = size / read
                rows.append(row)
                flashed = f"{row['flash_ms']:.3f}" if row["flash_ms"] else "none"
                print(
                    f"{tokens:7} tokens, head {width:3}, group {group}: "
                    f"sdpa {row['sdpa_ms']:.3f} ms, flash {flashed} ms | "
                    + ", ".join(
                        f"{bits} bits {row[f'{bits}_ms']:.3f} ms ({row[f'{bits}_gbs']:.0f} GB/s)"
                        for bits in packed
                    ),
                    flush=True,
                )
    print(f"{time.monotonic() - started:.0f} s")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_gbs": bandwidth,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
