"""A long run over a small store: limits hold, memory stays flat, and no answer changes.

    python benchmarks/soak.py [--requests 2000] [--images 300] [--memory 64MB] [--disk 256MB]

Requests of one to four images, drawn from a pool larger than the store, on the embedded model.
Every answer is compared with that of the same request on an empty store, with the same tokens
refreshed: what differs, a limit that is exceeded, or memory that grows, ends the run with exit
code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

import conduit_kv as ckv
from conduit_kv.bench.protocols import prompt_of
from conduit_kv.reuse.store import bytes_of
from conduit_kv.tasks import get_task
from conduit_kv.tasks.items import Item

_QUESTION = "What is in row 1, column 2?"
_GROWTH = 1.15
"""RSS at the end, as a multiple of that after the first fifth, that is still called flat."""


def rss() -> int:
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--memory", default="64MB")
    parser.add_argument("--disk", default="256MB")
    parser.add_argument("--plan", default="conduit:0.1")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    vlm = ckv.load(options.model, device="cpu")
    pool = [item.sources[0] for item in get_task("board").items(options.images)]
    rng, plan = random.Random(0), ckv.Plan.parse(options.plan)
    problems: list[str] = []
    sizes: list[int] = []
    hits = images = 0
    started = time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = ckv.Store(folder, memory=options.memory, max_bytes=options.disk)
        limits = bytes_of(options.memory), bytes_of(options.disk)
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()
        ) as bars:
            for number in bars.track(range(options.requests), description="soak"):
                sources = tuple(rng.choices(pool, k=rng.randint(1, 4)))
                item = Item(f"soak-{number}", "what", sources, _QUESTION, "")
                inputs = prompt_of(vlm, item, "short").head
                state = vlm.prefill(inputs, plan, store=store)
                fresh = vlm.prefill(inputs, plan, store=ckv.Store())
                mine, other = state.cache.reuse, fresh.cache.reuse
                if mine is None or other is None:
                    raise SystemExit(f"{plan} has no reuse stage")
                hits += mine.usage.cached_image_tokens
                images += mine.usage.image_tokens
                if not torch.equal(mine.refreshed, other.refreshed):
                    problems.append(f"request {number}: other tokens refreshed")
                elif vlm.decode_together([state], 4) != vlm.decode_together([fresh], 4):
                    problems.append(f"request {number}: another answer")
                if store.memory.nbytes > limits[0]:
                    problems.append(f"request {number}: memory tier at {store.memory.nbytes} B")
                if (size := size_of(folder)) > limits[1]:
                    problems.append(f"request {number}: disk tier at {size} B")
                sizes.append(rss())
        notes = list(store.notes)
    early, late = (
        max(part) for part in (sizes[: max(1, len(sizes) // 5)], sizes[-max(1, len(sizes) // 5) :])
    )
    if late > _GROWTH * early:
        problems.append(f"RSS grew from {early} to {late} B")
    found = {
        "requests": options.requests,
        "images": options.images,
        "plan": options.plan,
        "hit_rate": hits / max(images, 1),
        "rss_early": early,
        "rss_late": late,
        "seconds": time.time() - started,
        "problems": problems[:50],
        "notes": notes,
        "pid": os.getpid(),
    }
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
