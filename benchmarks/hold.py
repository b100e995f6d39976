"""What the hold stage costs in answers: every method on the tasks that are decided on what is held.

    python benchmarks/hold.py --json benchmarks/results/hold.json

Resumable: Ctrl-C keeps the items done, and a rerun goes on. ``--until MINUTES`` stops by itself.
Short answers are left out: the prefill decides them, and it sees the full cache.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

import conduit_kv as ckv
from conduit_kv.bench.record import write_json
from conduit_kv.bench.run import Bench, Settings
from conduit_kv.bench.stats import compare
from conduit_kv.methods.hold.kvcapsule import SHIPPED

TASKS = ("board-late", "board-follow-up", "board-list", "haystack-8-late")
WINDOWS = {
    # ours -> what it must be above, at equal payload bits or the nearest below
    "windowquant:3.17(tolerance=0)": (
        "random-windows:3.17(tolerance=0)",
        "rtn:3",
        "kivi:3(residual=0)",
    ),
    "windowquant:2.2(tolerance=0)": (
        "random-windows:2.2(tolerance=0)",
        "rtn:2",
        "kivi:2(residual=0)",
    ),
}
OPTIONS = (
    "windowquant:3.17",
    "windowquant:2.2(similarity=max, tolerance=0)",
    "windowquant:2.2(window=7, tolerance=0)",
    "rtn:4",
    "kivi:4(residual=0)",
    "fp8",
)
CAPSULES = {
    f"kvcapsule:{keep}": (
        f"stride-interpolate:{keep}",
        f"pca:{keep}",
        f"tgv-kv:{keep}(of=visual, decode=off)",
        f"text-random:{keep}(of=visual)",
    )
    for keep in (0.4, 0.2)
}


PARTS = ("windows", "options", "capsules")


class _Enough(Exception):
    """The time asked for is up."""


def comparisons(bench: Bench, pairs: dict[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    """Paired differences, task by task, over the items that both plans have answered."""
    found = []
    for part in bench._parts:
        if part.control is not None:
            continue
        for ours, others in pairs.items():
            for theirs in ("full", *others):
                triples = []
                for item in part.items:
                    known = [
                        bench.record.get(part.task.name, None, item.id, plan)
                        for plan in (str(ckv.Plan.parse(ours)), _key(theirs), "full")
                    ]
                    if all(known):
                        triples.append([entry[1] for entry in known if entry is not None])
                if triples:
                    mine, its, full = zip(*triples, strict=True)
                    means = [sum(scores) / len(scores) for scores in (mine, its, full)]
                    found.append(
                        {
                            "task": part.task.name,
                            "plan": ours,
                            "against": theirs,
                            "n": len(triples),
                            "accuracy": means[0],
                            "accuracy_against": means[1],
                            "accuracy_full": means[2],
                            **vars(compare(mine, its, full)),
                        }
                    )
    return found


def _key(plan: str) -> str:
    return plan if plan == "full" else str(ckv.Plan.parse(plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--n", type=int, default=300, help="items per task")
    parser.add_argument("--task", action="append", choices=TASKS)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--threads", type=int, help="of PyTorch")
    parser.add_argument("--until", type=float, help="stop after so many minutes")
    options = parser.parse_args()
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    vlm = ckv.load("embedded", device="cpu")
    pairs: dict[str, tuple[str, ...]] = {}
    extra: tuple[str, ...] = ()
    if options.part in ("windows", "all"):
        pairs = {**WINDOWS}
    if options.part in ("options", "all"):
        extra = OPTIONS
    if options.part in ("capsules", "all"):
        if SHIPPED.is_file():
            pairs |= CAPSULES
        else:
            print(f"no artefact at {SHIPPED}: kvcapsule is left out")
    names = [*pairs, *(name for others in pairs.values() for name in others), *extra]
    plans = tuple(ckv.Plan.parse(name) for name in dict.fromkeys(["full", *names]))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.until if options.until else None
    tasks = tuple(options.task or TASKS)
    settings = Settings(tasks, plans, options.n, 0, (), None, 0)
    bench = Bench(vlm, settings, options.json, "keep")
    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()
    ) as bars:
        bar = bars.add_task(f"{len(plans)} plans", total=bench.steps)

        def advance(task: str) -> None:
            bars.advance(bar)
            if end is not None and time.monotonic() > end:
                raise _Enough

        with contextlib.suppress(_Enough):
            bench.run(advance)
    results = bench.results()
    results["comparisons"] = comparisons(bench, pairs)
    write_json(options.json, results)
    for row in results["comparisons"]:
        print(
            f"{row['task']:16} {row['plan']:32} {row['accuracy']:.3f} against "
            f"{row['against']:36} {row['accuracy_against']:.3f} (full {row['accuracy_full']:.3f}): "
            f"{row['mean']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}] {row['verdict']}, "
            f"n {row['n']}"
        )


if __name__ == "__main__":
    main()
