"""Which plan suits which usage: every evict method on every task, with paired intervals.

    python benchmarks/usage.py --json benchmarks/results/usage.json

Resumable: Ctrl-C keeps the items done, and a rerun goes on. ``--until MINUTES`` stops by itself.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

import conduit_kv as ckv
from conduit_kv.bench.run import Bench, Settings

SHARES = ("0.5", "0.2", "0.1", "0.05")
MAIN = ("tgv-kv", "snapkv", "h2o", "text-random", "uniform")
OTHERS = (
    "random",
    "streaming-llm",
    "pyramidkv",
    "ada-kv",
    "tova",
    "knorm",
    "vl-cache",
    "look-m",
    "prefixkv",
    "aircache",
)
VARIANTS = (
    "tgv-kv:{}(of=visual, rows=last)",
    "tgv-kv:{}(of=visual, rows=all)",
    *tuple(
        f"{method}:{{}}(of=visual, cover={cover})"
        for method in ("tgv-kv", "snapkv")
        for cover in (0.25, 0.5, 0.75)
    ),
)
TASKS = (
    "board",
    "board-late",
    "board-follow-up",
    "board-list",
    "board-sparse",
    "board-sparse-late",
    "board-sparse-follow-up",
    "board-sparse-list",
    "haystack-8-late",
    "haystack-8-follow-up",
)


def plans_of(names: tuple[str, ...]) -> tuple[ckv.Plan, ...]:
    """Each method at each share of the visual tokens, all text kept."""
    texts = [name if "{}" in name else f"{name}:{{}}(of=visual)" for name in names]
    return tuple(ckv.Plan.parse(text.format(share)) for text in texts for share in SHARES)


class _Enough(Exception):
    """The time asked for is up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--n", type=int, default=300, help="items per task, main methods")
    parser.add_argument("--n-others", type=int, default=60, help="items per task, the others")
    parser.add_argument("--task", action="append", choices=TASKS)
    parser.add_argument("--until", type=float, help="stop after so many minutes")
    options = parser.parse_args()
    vlm = ckv.load("embedded", device="cpu")
    tasks = tuple(options.task or TASKS)
    main_plans = plans_of(MAIN)
    everything = main_plans + plans_of(VARIANTS) + plans_of(OTHERS)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.until if options.until else None
    # First a few items under every plan, then more of them under the main ones: one record.
    for plans, n, timed in ((everything, options.n_others, 0), (main_plans, options.n, 1)):
        settings = Settings(tasks, plans, n, 0, ("wrong-image",) if timed else (), None, timed)
        bench = Bench(vlm, settings, options.json, "keep")
        with Progress(
            *Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()
        ) as bars:
            bar = bars.add_task(f"{len(plans)} plans", total=bench.steps)

            def advance(task: str, bars: Progress = bars, bar: object = bar) -> None:
                bars.advance(bar)  # type: ignore[arg-type]
                if end is not None and time.monotonic() > end:
                    raise _Enough

            try:
                bench.run(advance)
            except _Enough:
                break
    # One file for all plans, each row with the items that are known for it.
    final = Settings(tasks, everything, options.n, 0, ("wrong-image",), None, 0)
    bench = Bench(vlm, final, options.json, "keep")
    from conduit_kv.bench.record import write_json

    write_json(options.json, bench.results())


if __name__ == "__main__":
    main()
