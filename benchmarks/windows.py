"""Which windows WindowQuant gives its bits to: those in which the answer lies, or others?

    python benchmarks/windows.py --json benchmarks/results/windows.json

For every item the visual tokens of the pictures that decide the answer are known (as in
``causes.py``). A search that finds them gives them more bits than the average; windows drawn by
chance give them the same. ``--picture`` draws the first item of each task.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from causes import answer_tokens
from rich.progress import track

import conduit_kv as ckv
from conduit_kv.bench.protocols import prompt_of
from conduit_kv.bench.stats import compare
from conduit_kv.picture import Retention, draw_retention
from conduit_kv.tasks import get_task

TASKS = ("board-late", "board-sparse-late", "haystack-8-late")
PLANS = (
    "windowquant:3.17(tolerance=0)",
    "windowquant:3.17(tolerance=0, similarity=max)",
    "windowquant:3.17(tolerance=0, window=7)",
    "random-windows:3.17(tolerance=0)",
)


def bits_of(vlm: ckv.VLM, name: str, n: int, picture: Path | None) -> dict[str, Any]:
    """Per plan: bits of the answer's tokens and of all visual ones, mean over layers and items."""
    task = get_task(name)
    plans = [ckv.Plan.parse(text) for text in PLANS]
    there: dict[str, list[float]] = defaultdict(list)
    everywhere: dict[str, list[float]] = defaultdict(list)
    for number, item in enumerate(track(task.items(n), description=name)):
        prompt = prompt_of(vlm, item, task.protocol)
        state = vlm.prefill(prompt.head, "full", watch=plans)
        wanted = answer_tokens(item, state.cache.progress.layouts[0])
        if not wanted.any():
            continue
        retentions = [Retention.of(fork.cache) for fork in vlm.forks(state, plans)]
        for text, retention in zip(PLANS, retentions, strict=True):
            bits = torch.from_numpy(retention.bits).mean(0)
            there[text].append(float(bits[wanted].mean()))
            everywhere[text].append(float(bits[retention.layout.visual].mean()))
        if number == 0 and picture is not None:
            draw_retention(retentions, list(item.images), picture.with_stem(f"windows-{name}"))
    return {
        text: {
            "n": len(there[text]),
            "answer_bits": sum(there[text]) / len(there[text]),
            "all_bits": sum(everywhere[text]) / len(everywhere[text]),
            "difference": vars(compare(there[text], everywhere[text])),
        }
        for text in PLANS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--task", action="append")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--picture", type=Path, help="a PNG; one per task is named after it")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    vlm = ckv.load("embedded", device="cpu")
    found = {}
    for name in options.task or TASKS:
        found[name] = bits_of(vlm, name, options.n, options.picture)
        print(name, json.dumps(found[name], indent=1), flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
