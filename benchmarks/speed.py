"""Prefill and decoding against plain Transformers, in one run: times, ratios and peak memory.

    python benchmarks/speed.py --json out/speed.json

Plain Transformers runs with SDPA, as it does by default; beside it the eager way with attention
weights, which public code of eviction methods takes. Variants run in turn, round after round, so
that all see the same machine; medians and ratios of medians are printed. Times begin at processed
inputs; the image encoder's share, the same for all, is printed and taken out of the ratios.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import conduit_kv as ckv
from conduit_kv.tasks import get_task, messages

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def inputs_of(vlm: ckv.VLM, images: int) -> dict[str, Any]:
    """A haystack prompt of so many boards (at most 40 different ones)."""
    (item,) = get_task(f"haystack-{images}").items(1, seed=7)
    return vlm.process(vlm.render(messages(item)), item.images)


@torch.inference_mode()
def plain_prefill(vlm: ckv.VLM, inputs: dict[str, Any], **options: Any) -> Any:
    return vlm.model(**inputs, use_cache=True, logits_to_keep=1, **options)


def eager_prefill(vlm: ckv.VLM, inputs: dict[str, Any]) -> Any:
    vlm.model.set_attn_implementation("eager")
    try:
        return plain_prefill(vlm, inputs, output_attentions=True)
    finally:
        vlm.model.set_attn_implementation("sdpa")


def encode(vlm: ckv.VLM, inputs: dict[str, Any]) -> Any:
    with torch.inference_mode():
        return vlm.model.model.get_image_features(pixel_values=inputs["pixel_values"])


def rounds(variants: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each variant, run in turn."""
    for run in variants.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def prefill(dtype: str, images: int, repeats: int, eager: bool) -> dict[str, Any]:
    vlm = ckv.load("embedded", dtype=DTYPES[dtype], device="cpu")
    inputs = inputs_of(vlm, images)
    variants: dict[str, Callable[[], Any]] = {
        "encode": lambda: encode(vlm, inputs),
        "plain": lambda: plain_prefill(vlm, inputs),
        "full": lambda: vlm.prefill(inputs, "full"),
        "tgv-kv:0.2": lambda: vlm.prefill(inputs, "tgv-kv:0.2"),
        "snapkv:0.2": lambda: vlm.prefill(inputs, "snapkv:0.2"),
        "h2o:0.2": lambda: vlm.prefill(inputs, "h2o:0.2"),
    }
    seconds = rounds(variants, repeats)
    if eager:
        start = time.perf_counter()
        eager_prefill(vlm, inputs)
        seconds["plain, eager with weights"] = [time.perf_counter() - start]
    median = {name: statistics.median(values) for name, values in seconds.items()}
    base = median["plain"] - median["encode"]
    return {
        "dtype": dtype,
        "images": images,
        "tokens": int(inputs["input_ids"].shape[1]),
        "seconds": median,
        "all_seconds": seconds,
        "ratio_to_plain": {
            name: (value - median["encode"]) / base
            for name, value in median.items()
            if name != "encode"
        },
    }


def _peak(dtype: str, images: int, variant: str, out: Any) -> None:
    vlm = ckv.load("embedded", dtype=DTYPES[dtype], device="cpu")
    inputs = inputs_of(vlm, images)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if variant == "plain":
        plain_prefill(vlm, inputs)
    elif variant == "eager":
        eager_prefill(vlm, inputs)
    else:
        vlm.prefill(inputs, variant)
    out.put((before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))


def peak_memory(dtype: str, images: int, variants: list[str]) -> dict[str, Any]:
    """Peak resident memory of one prefill, each variant in a fresh process, in MB."""
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for variant in variants:
        queue = context.Queue()
        process = context.Process(target=_peak, args=(dtype, images, variant, queue))
        process.start()
        before, after = queue.get()
        process.join()
        peaks[variant] = {"before_mb": before / 1024, "peak_mb": after / 1024}
    plain = peaks["plain"]["peak_mb"]
    ratios = {name: peak["peak_mb"] / plain for name, peak in peaks.items()}
    return {"dtype": dtype, "images": images, "peaks": peaks, "ratio_to_plain": ratios}


def decode(dtype: str, images: int, steps: int, repeats: int) -> dict[str, Any]:
    """Seconds per output token with a long cache."""
    vlm = ckv.load("embedded", dtype=DTYPES[dtype], device="cpu")
    inputs = inputs_of(vlm, images)
    short = vlm.process(vlm.render([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]))
    plain = {"state": plain_prefill(vlm, inputs), "seen": inputs["input_ids"].shape[1]}
    states = {
        "full": vlm.prefill(inputs, "full"),
        "tgv-kv:0.05": vlm.prefill(inputs, "tgv-kv:0.05"),
        "tgv-kv:0.05(every=16)": vlm.prefill(inputs, "tgv-kv:0.05(every=16)"),
        "tgv-kv:0.05(decode=off)": vlm.prefill(inputs, "tgv-kv:0.05(decode=off)"),
        "empty cache": vlm.prefill(short, "full"),
    }
    token = torch.tensor([[5]])

    @torch.inference_mode()
    def plain_steps() -> None:
        cache = plain["state"].get("cache", plain["state"].get("past_key_values"))
        for _ in range(steps):
            vlm.model(input_ids=token, use_cache=True, past_key_values=cache)

    def our_steps(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(steps):
                vlm.step([states[name]], [5])

        return run

    variants = {"plain": plain_steps, **{name: our_steps(name) for name in states}}
    seconds = {
        name: [value / steps for value in values]
        for name, values in rounds(variants, repeats).items()
    }
    median = {name: statistics.median(values) for name, values in seconds.items()}
    reports = {name: state.report for name, state in states.items()}
    return {
        "dtype": dtype,
        "cached": int(inputs["input_ids"].shape[1]),
        "seconds_per_token": median,
        "all_seconds": seconds,
        "ratio_to_plain": {name: value / median["plain"] for name, value in median.items()},
        "ratio_to_empty": {name: value / median["empty cache"] for name, value in median.items()},
        "kv_bytes": {name: report.kv_bytes for name, report in reports.items()},
        "kv_allocated_bytes": {name: r.kv_allocated_bytes for name, r in reports.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", choices=["prefill", "memory", "decode"], action="append")
    parser.add_argument("--dtype", choices=list(DTYPES), action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--no-eager", action="store_true")
    options = parser.parse_args()
    only = options.only or ["prefill", "memory", "decode"]
    result: dict[str, Any] = {
        "manifest": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
            "repeats": options.repeats,
        }
    }
    for dtype in options.dtype or list(DTYPES):
        if "prefill" in only:
            found = prefill(dtype, 16, options.repeats, not options.no_eager)
            result.setdefault("prefill", []).append(found)
            show(f"prefill {dtype}, {found['tokens']} tokens", found)
        if "memory" in only:
            variants = ["plain", "full", "tgv-kv:0.2", *([] if options.no_eager else ["eager"])]
            found = peak_memory(dtype, 16, variants)
            result.setdefault("memory", []).append(found)
            show(f"peak memory {dtype}", found)
        if "decode" in only:
            found = decode(dtype, 39, options.steps, options.repeats)
            result.setdefault("decode", []).append(found)
            show(f"decoding {dtype}, {found['cached']} cached", found)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1))


def show(title: str, found: dict[str, Any]) -> None:
    print(title)
    values = (
        found.get("seconds")
        or found.get("seconds_per_token")
        or {name: peak["peak_mb"] for name, peak in found["peaks"].items()}
    )
    for name, value in values.items():
        ratio = found["ratio_to_plain"].get(name)
        empty = found.get("ratio_to_empty", {}).get(name)
        line = f"  {name:28} {value:10.4f}"
        line += f"   {ratio:6.3f} x plain" if ratio is not None else ""
        line += f"   {empty:6.3f} x empty cache" if empty is not None else ""
        print(line, flush=True)


if __name__ == "__main__":
    main()
