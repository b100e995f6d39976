"""``conduit-kv bench``: plans on tasks, with intervals, and results that can be gone on with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conduit_kv.cli.common import (
    DeviceOption,
    ModelOption,
    ThreadsOption,
    check_target,
    complain,
    console,
    guarded,
    load_vlm,
    seconds_text,
    share_text,
    size_text,
)

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_PLANS = ("full", "tgv-kv:0.5", "tgv-kv:0.2", "tgv-kv:0.1", "tgv-kv:0.05")
_ON_CHANGE = ("stop", "restart", "keep")


@guarded
def bench(
    task: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help="Tasks, joined by commas or repeated."),
    ] = None,
    plan: Annotated[
        list[str] | None, typer.Option("--plan", "-p", help="A plan; repeat for several.")
    ] = None,
    model: ModelOption = "embedded",
    n: Annotated[int, typer.Option("--n", "-n", help="Items per task.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the items.")] = 0,
    control: Annotated[
        list[str] | None,
        typer.Option(
            help="wrong-image: also with the images of another item; random: also text-random "
            "with each plan's budget."
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Compare every row with this plan, beside full.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write manifest and rows; a rerun with the same FILE goes on with it."
        ),
    ] = None,
    on_change: Annotated[
        str,
        typer.Option(
            help="If FILE was begun under other versions, weights or settings: stop, restart "
            "(forget it) or keep (mix, and say so)."
        ),
    ] = "stop",
    timed: Annotated[
        int, typer.Option(help="Items on which each plan is timed alone; 0 for none.")
    ] = 3,
    samples: Annotated[
        int,
        typer.Option(help="Items of each task of which what each plan keeps is kept, for report."),
    ] = 2,
    device: DeviceOption = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="By default float32 for the embedded model, so that answers do not depend on the "
            "plans beside them, and the weights' own for others."
        ),
    ] = None,
    threads: ThreadsOption = None,
) -> None:
    """Measure plans on tasks: answers, tokens and bytes kept, seconds, with 95 % intervals.

    All plans answer from one prefill per item. Ctrl-C keeps what is done; the same command goes on.

    conduit-kv bench --task board,board-late --plan full --plan tgv-kv:0.2 --n 50 --json out.json
    """
    from conduit_kv.errors import InputError
    from conduit_kv.tasks import get_task, task_names

    check_target(json)
    if on_change not in _ON_CHANGE:
        raise InputError(f"--on-change {on_change}: choose one of {', '.join(_ON_CHANGE)}")
    tasks = tuple(name.strip() for part in task or () for name in part.split(",") if name.strip())
    if not tasks:
        raise InputError(f"name a task: --task board; known are {', '.join(task_names())}")
    for name in tasks:
        get_task(name)

    from conduit_kv.bench import Bench, Settings
    from conduit_kv.plan import Plan

    settings = Settings(
        tasks=tasks,
        plans=tuple(Plan.of(text) for text in plan or DEFAULT_PLANS),
        n=n,
        seed=seed,
        controls=tuple(control or ()),
        against=None if against is None else Plan.of(against),
        timed=timed,
        samples=samples,
    )
    dtype = dtype or ("float32" if model == "embedded" else "auto")
    vlm = load_vlm(model, device, dtype, threads)
    run = Bench(vlm, settings, json, on_change)  # type: ignore[arg-type]
    if len(run.record):
        typer.echo(f"going on with {len(run.record)} items that are known already", err=True)
    try:
        with _progress(run.steps) as step:
            results = run.run(step)
    except KeyboardInterrupt:
        kept = f"{len(run.record)} items are kept in {json}" if json else "nothing was kept"
        complain(f"stopped: {kept}" + ("; the same command goes on" if json else " (no --json)"))
        raise typer.Exit(130) from None
    out = console()
    for table in _tables(results["rows"]):
        out.print(table)
    out.print("vs full: ↑ above, ↓ below (95 %), = both within a point of it, · not separated")
    if json is not None:
        typer.echo(f"{len(results['rows'])} rows in {json}")


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, gone when done; nothing where nobody watches."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda name: bar.update(task, advance=1, description=name)


def _tables(rows: list[dict[str, Any]]) -> Iterator[Table]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    parts: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for row in rows:
        parts.setdefault((row["task"], row["control"]), []).append(row)
    for (task, control), mine in parts.items():
        title = f"{task}, {mine[0]['protocol']}, n = {mine[0]['n']}"
        if control:
            title += f", control: {control}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("plan", overflow="fold")
        for column in ("accuracy (95 %)", "vs full", "agree", "kept", "K/V", "first", "per token"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in mine:
            table.add_row(*_cells(row))
        yield table


def _cells(row: dict[str, Any]) -> list[str]:
    difference = row["vs_full"]
    return [
        row["plan"],
        f"{row['accuracy']:.3f} ({row['accuracy_low']:.2f}-{row['accuracy_high']:.2f})",
        f"{difference['mean']:+.3f} {_SIGN[difference['verdict']]}",
        f"{row['agreement']:.2f}",
        f"{row['kept_tokens']:.0f} ({share_text(row['kept_tokens'], row['total_tokens'])})",
        size_text(row["kv_bytes"]),
        seconds_text(row["first_token_s"]),
        seconds_text(row["per_token_s"]),
    ]


_SIGN = {"above": "↑", "below": "↓", "tie": "=", "not separated": "·"}
"""How a verdict is shown."""
