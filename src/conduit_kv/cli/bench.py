"""``conduit-kv bench``: plans on tasks, with intervals, and results that can be gone on with."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conduit_kv.cli.common import (
    ThreadsOption,
    check_target,
    complain,
    console,
    guarded,
    seconds_text,
    share_text,
    size_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from conduit_kv.bench import Settings
    from conduit_kv.bench.sweep import Sweep

_ON_CHANGE = ("stop", "restart", "keep")


@guarded
def bench(
    task: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", help="Tasks, joined by commas or repeated."),
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", "-p", help="A plan; repeat for several. {} takes each budget."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", help="Budgets for plans with {}, joined by commas."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", help='"embedded" (default), a hub name or a folder; repeat for more.'
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="A sweep in YAML; options given here come first."),
    ] = None,
    n: Annotated[int | None, typer.Option("--n", "-n", help="Items per task (100).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the items (0).")] = None,
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
            "--json",
            help="Write manifest and rows; a rerun with the same FILE goes on with it. With "
            "several models a folder, in which each has its file.",
        ),
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Write the rows of all models, .jsonl or .parquet.")
    ] = None,
    on_change: Annotated[
        str,
        typer.Option(
            help="If FILE was begun under other versions, weights or settings: stop, restart "
            "(forget it) or keep (mix, and say so)."
        ),
    ] = "stop",
    timed: Annotated[
        int | None, typer.Option(help="Items on which each plan is timed alone (3); 0 for none.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Items of each task of which is kept what plans keep, for report (2)."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", min=1, help="Processes that ask, each with the model."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help='Ask on a Ray cluster: its address, "auto", or "local"; --workers actors.'
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help='"cpu", "cuda:0,cuda:1", ...: workers take them in turn.'),
    ] = None,
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

    conduit-kv bench -c sweep.yaml --workers 2 --json results/ --rows rows.parquet
    """
    from conduit_kv.errors import InputError

    if on_change not in _ON_CHANGE:
        raise InputError(f"--on-change {on_change}: choose one of {', '.join(_ON_CHANGE)}")

    from conduit_kv.bench.rows import ENDINGS, write_rows
    from conduit_kv.bench.sweep import Sweep, read_sweep

    check_target(rows, ENDINGS)
    sweep = (Sweep() if config is None else read_sweep(config)).replace(
        models=_list(model),
        tasks=_list(task),
        plans=tuple(plan) if plan else None,
        budgets=_list(budget),
        n=n,
        seed=seed,
        controls=_list(control),
        against=against,
        timed=timed,
        samples=samples,
        workers=workers,
        device=device,
        dtype=dtype,
    )
    # A stop from outside keeps what is done and ends the workers, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = measure(sweep, json, on_change, threads, ray)
    if rows is not None:
        write_rows(found, rows)
        typer.echo(f"{len(found)} rows in {rows}")


def measure(
    sweep: Sweep,
    json: Path | None,
    on_change: str = "stop",
    threads: int | None = None,
    ray: str | None = None,
) -> list[dict[str, Any]]:
    """Run a sweep and print its tables; gives the rows of all models."""
    from conduit_kv.errors import InputError
    from conduit_kv.tasks import task_names

    if not sweep.tasks:
        raise InputError(f"name a task: --task board; known are {', '.join(task_names())}")
    settings = sweep.settings()
    found = []
    for name, file in _files(sweep.models, json):
        run = _Run(sweep, settings, name, file, on_change, threads, ray)
        results = run()
        found += results["rows"]
        out = console()
        if len(sweep.models) > 1:
            out.print(f"[bold]{name}[/]")
        for table in _tables(results["rows"]):
            out.print(table)
        if file is not None:
            typer.echo(f"{len(results['rows'])} rows in {file}")
    console().print(
        "vs full: ↑ above, ↓ below (95 %), = both within a point of it, · not separated"
    )
    return found


def _list(values: list[str] | None) -> tuple[str, ...] | None:
    """Repeated options whose values may be joined by commas."""
    if not values:
        return None
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def _files(models: tuple[str, ...], json: Path | None) -> list[tuple[str, Path | None]]:
    """Where each model's results go."""
    from conduit_kv.bench.sweep import slug
    from conduit_kv.errors import InputError

    if json is None:
        return [(model, None) for model in models]
    if len(models) == 1 and not json.is_dir():
        check_target(json)
        return [(models[0], json)]
    if json.suffix == ".json" or json.is_file():
        raise InputError(f"{json}: with several models name a folder, in which each has its file")
    json.mkdir(parents=True, exist_ok=True)
    files: list[tuple[str, Path | None]] = [
        (model, json / f"{slug(model)}.json") for model in models
    ]
    if len({file for _, file in files}) < len(files):
        raise InputError(f"two of the models {', '.join(models)} would share a file in {json}")
    return files


class _Run:
    """One model's part of a sweep."""

    def __init__(
        self,
        sweep: Sweep,
        settings: Settings,
        model: str,
        file: Path | None,
        on_change: str,
        threads: int | None,
        ray: str | None,
    ) -> None:
        from conduit_kv.bench import Bench, Crew
        from conduit_kv.bench.parallel import Processes, Source

        dtype = sweep.dtype or ("float32" if model == "embedded" else "auto")
        source = Source(model, sweep.device, dtype, threads)
        self.crew: Crew | None = None
        if ray is not None:
            from conduit_kv.integrations.ray import RayCluster

            self.crew = RayCluster(source, settings, sweep.workers, ray)
        elif sweep.workers > 1:
            self.crew = Processes(source, settings, sweep.workers)
        self.file = file
        self.bench = Bench(source.load(), settings, file, on_change)  # type: ignore[arg-type]

    def __call__(self) -> dict[str, Any]:
        record = self.bench.record
        if len(record):
            typer.echo(f"going on with {len(record)} items that are known already", err=True)
        try:
            with _progress(self.bench.steps) as step:
                return self.bench.run(step, self.crew)
        except KeyboardInterrupt:
            complain(
                f"stopped: {len(record)} items are kept in {self.file}; the same command goes on"
                if self.file
                else "stopped: nothing was kept (no --json)"
            )
            raise typer.Exit(130) from None


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
