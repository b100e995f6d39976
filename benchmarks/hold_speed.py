"""Decode attention and memory of packed caches against the dense one, in one run on the CPU.

    python benchmarks/hold_speed.py --json benchmarks/results/hold_speed.json

The shape is the built-in model's: 30 layers, 9 query heads on 3 KV heads of 64, bf16. Every layer
has numbers of its own, so that no layer finds the last one's in a processor's cache. The dense
comparator is the fastest dense path, found by timing all of them. Variants run in turn, round after
round, so that all see the same machine; medians are printed. ``--model`` adds whole decoding steps
of the built-in model, and the share of a step that the cache is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import rounds
from torch import Tensor

import conduit_kv as ckv
from conduit_kv.attention.paths import grouped, sdpa
from conduit_kv.cache import PackedSegment, Part, Quantised, VisualCache
from conduit_kv.cache.capsule import BlockParts, Capsule
from conduit_kv.kernels import cpu
from conduit_kv.layout import Layout
from conduit_kv.methods.hold import WindowQuant

LAYERS, HEADS, KV_HEADS, WIDTH = 30, 9, 3, 64
TEXT = 64
"""Text tokens beside the visual ones, in full precision."""
BLOCK = 14


def dense_layers(visual: int, layers: int) -> VisualCache:
    """A cache that holds ``visual`` tokens and some text in full precision."""
    cache = VisualCache(["full"] * layers)
    count = visual + TEXT
    cache.progress.advance(
        torch.ones(1, count, dtype=torch.bool),
        [Layout.text_only(count)],
        [torch.arange(count)[None]],
    )
    for number, layer in enumerate(cache):
        random = torch.Generator().manual_seed(number)
        shape = (1, KV_HEADS, count, WIDTH)
        keys, values = (torch.randn(shape, generator=random).bfloat16() for _ in range(2))
        layer.update(keys, values)
    cache.progress.step_tokens = torch.tensor([[count]], dtype=torch.int32)
    return cache


def windows(visual: int, average: float) -> Tensor:
    """``[visual]`` bits: what WindowQuant gives rows of 14 tokens of random similarity."""
    rows = visual // BLOCK
    similarity = torch.rand(rows, generator=torch.Generator().manual_seed(0))
    sizes = torch.full((rows,), BLOCK)
    bits = WindowQuant(average).assign(similarity, sizes).repeat_interleave(BLOCK)
    return torch.cat([bits, torch.full((visual - len(bits),), 2)])


def packed_layers(visual: int, layers: int, pack: Callable[[Any], None]) -> VisualCache:
    cache = dense_layers(visual, layers)
    for layer in cache:
        pack(layer)
    return cache


def quantise(bits: Tensor) -> Callable[[Any], None]:
    def pack(layer: Any) -> None:
        segments = []
        for level in (2, 3, 4, 8):
            at = torch.nonzero(bits == level).flatten()
            if len(at):
                store = Quantised.of(layer.tail.keys[0][:, at], layer.tail.values[0][:, at], level)
                part = Part(0, KV_HEADS, at.int(), store, torch.bfloat16)
                segments.append(PackedSegment([[part]], KV_HEADS))
        layer.freeze(segments)

    return pack


def encapsulate(keep: float, once: bool, visual: int) -> Callable[[Any], None]:
    count = int(keep * BLOCK + 1e-9)
    random = torch.Generator().manual_seed(1)
    blocks = visual // BLOCK
    # Tokens one after another, as in a prompt: every block is turned like the others.
    frequency = 1e5 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
    angle = torch.arange(blocks * BLOCK)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()

    def pack(layer: Any) -> None:
        mean = torch.randn(KV_HEADS, BLOCK, WIDTH, generator=random)
        basis = torch.linalg.qr(torch.randn(BLOCK, count, generator=random)).Q.contiguous()
        kept = torch.linspace(0, BLOCK - 1, count).round().long()
        mix = torch.randn(BLOCK - count, count, generator=random)
        parts = BlockParts(kept, mix, mean, mean.clone(), basis, basis.T.contiguous())
        size = blocks * BLOCK
        keys, values = (x[0][:, :size].contiguous() for x in (layer.tail.keys, layer.tail.values))
        store = Capsule.of(keys, values, cos, sin, parts, once)
        part = Part(0, KV_HEADS, torch.arange(size, dtype=torch.int32), store, torch.bfloat16)
        layer.freeze([PackedSegment([[part]], KV_HEADS)])

    return pack


def visual_bytes(cache: VisualCache, visual: int) -> float:
    """Bytes of the visual tokens: all that is allocated but the text's share of the dense tail."""
    text = sum(layer.bytes_per_token + 4 for layer in cache) * TEXT
    held = sum(
        tensor.numel() * tensor.element_size() if segment is not layer.tail else used
        for layer in cache
        for segment in layer.segments
        for _, tensor, used in segment.tensors()
    )
    rotary = {
        id(t): t.numel() * t.element_size()
        for layer in cache
        for segment in layer.frozen
        for kind, t, _ in segment.tensors()
        if kind == "rotary"
    }
    counted = sum(
        t.numel() * t.element_size()
        for layer in cache
        for segment in layer.frozen
        for kind, t, _ in segment.tensors()
        if kind == "rotary"
    )
    return held - text - counted + sum(rotary.values())


def attention(visual: int, layers: int, repeats: int) -> dict[str, Any]:
    """One decoding step's attention over all layers."""
    caches = {"dense": dense_layers(visual, layers)}
    bits = windows(visual, 3.17)
    started = time.perf_counter()
    caches["windowquant:3.17"] = packed_layers(visual, layers, quantise(bits))
    packing = time.perf_counter() - started
    caches["kivi:2"] = packed_layers(visual, layers, quantise(torch.full((visual,), 2)))
    caches["kivi:4"] = packed_layers(visual, layers, quantise(torch.full((visual,), 4)))
    caches["kvcapsule:0.4"] = packed_layers(visual, layers, encapsulate(0.4, False, visual))
    caches["kvcapsule:0.4(rebuild=once)"] = packed_layers(
        visual, layers, encapsulate(0.4, True, visual)
    )
    random = torch.Generator().manual_seed(9)
    query = torch.randn(1, HEADS, 1, WIDTH, generator=random).bfloat16()
    scaling, slots = WIDTH**-0.5, visual + TEXT

    def over(cache: VisualCache) -> Callable[[], None]:
        def run() -> None:
            for layer in cache:
                layer.attend(query, scaling, None)

        return run

    def path(function: Any) -> Callable[[], None]:
        def run() -> None:
            for layer in caches["dense"]:
                tail = layer.tail
                function(query, tail._keys, tail._values, scaling, slots=slots, new=1)

        return run

    variants = {name: over(cache) for name, cache in caches.items() if name != "dense"}
    variants |= {"dense, grouped": path(grouped), "dense, sdpa": path(sdpa)}
    with torch.inference_mode():
        seconds = rounds(variants, repeats)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    best = {name: min(values) for name, values in seconds.items()}
    fastest = min((n for n in median if n.startswith("dense")), key=lambda n: median[n])
    whole = visual_bytes(caches["dense"], visual)
    sizes = {name: visual_bytes(cache, visual) for name, cache in caches.items()}
    learned = {
        name: sum(
            part.store.parts.bytes()
            for layer in cache
            for segment in layer.frozen
            for part in segment.rows[0]
            if isinstance(part.store, Capsule)
        )
        for name, cache in caches.items()
    }
    return {
        "visual_tokens": visual,
        "layers": layers,
        "average_bits": float(bits.float().mean()),
        "median_s": median,
        "best_s": best,
        "fastest_dense": fastest,
        "time_to_dense": {name: median[name] / median[fastest] for name in median},
        "best_to_dense": {name: best[name] / best[fastest] for name in best},
        "visual_bytes": sizes,
        "times_smaller": {name: whole / size for name, size in sizes.items()},
        "learned_bytes": {name: size for name, size in learned.items() if size},
        "packing_s": packing,
    }


def steps(images: int, repeats: int) -> dict[str, Any]:
    """Whole decoding steps of the built-in model."""
    from conduit_kv.tasks import get_task, messages

    vlm = ckv.load("embedded", device="cpu")
    (item,) = get_task(f"haystack-{images}").items(1, seed=7)
    inputs = vlm.process(vlm.render(messages(item)), item.images)
    plans = ("full", "windowquant:3.17(tolerance=0)", "windowquant:3.17", "kivi:4(residual=0)")
    prefill, states = {}, {}
    for plan in plans:
        start = time.perf_counter()
        states[plan] = vlm.prefill(inputs, plan)
        prefill[plan] = time.perf_counter() - start
    short = vlm.process(vlm.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]))
    states["empty cache"] = vlm.prefill(short, "full")
    seconds = rounds(
        {plan: (lambda state=state: vlm.step([state], [5])) for plan, state in states.items()},
        repeats,
    )
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "tokens": int(inputs["input_ids"].shape[1]),
        "prefill_s": prefill,
        "guard_s": prefill["windowquant:3.17"] - prefill["windowquant:3.17(tolerance=0)"],
        "step_s": median,
        "cache_share_of_a_step": {
            name: 1 - median["empty cache"] / value for name, value in median.items()
        },
        "kv_bytes": {name: states[name].report.kv_bytes for name in plans},
        "allocated_bytes": {name: states[name].report.kv_allocated_bytes for name in plans},
        "visual_bits": {name: states[name].report.visual_bits for name in plans},
        "notes": {name: list(states[name].report.notes) for name in plans},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", type=int, action="append", help="visual tokens; 8192 and 32768")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--model", action="store_true", help="also whole steps of the model")
    parser.add_argument("--images", type=int, default=40)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if not cpu.available():
        print("the kernel is missing: pip install conduit-kv[kernels]")
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernel": cpu.available(),
        "load": os.getloadavg(),
        "attention": [
            attention(count, options.layers, options.repeats)
            for count in options.tokens or (8192, 32768)
        ],
    }
    if options.model:
        results["steps"] = steps(options.images, options.repeats)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))
    for found in results["attention"]:
        print(f"{found['visual_tokens']} visual tokens, {found['layers']} layers")
        for name, value in sorted(found["median_s"].items(), key=lambda pair: pair[1]):
            smaller = found["times_smaller"].get(name)
            size = f", {smaller:.2f} x smaller" if smaller else ""
            print(
                f"  {name:30} {1000 * value:8.2f} ms, {found['time_to_dense'][name]:.2f} x dense "
                f"(best runs {found['best_to_dense'][name]:.2f} x){size}"
            )
        for name, size in found["learned_bytes"].items():
            print(f"  {name:30} learned parts {size / 1e6:.2f} MB besides")
    if options.model:
        print(json.dumps(results["steps"], indent=1))


if __name__ == "__main__":
    main()
