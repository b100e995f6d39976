"""``conduit-kv tune``: the cheapest plan that keeps what is wanted, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from conduit_kv.cli.common import (
    DeviceOption,
    ModelOption,
    ThreadsOption,
    check_target,
    console,
    guarded,
    size_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from conduit_kv.bench.tune import Tuned


@guarded
def tune(
    task: Annotated[
        list[str], typer.Option("--task", "-t", help="Tasks, joined by commas or repeated.")
    ],
    model: ModelOption = "embedded",
    target: Annotated[
        float, typer.Option(help="Share of the full cache's accuracy that is to be kept.")
    ] = 0.98,
    max_bytes: Annotated[
        str | None, typer.Option(help="Most K/V held per item, as in 4MB or 1GiB.")
    ] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option("--plan", "-p", help="Candidates in place of the usual ones; {} as in bench."),
    ] = None,
    budget: Annotated[
        list[str] | None, typer.Option("--budget", "-b", help="For {}, joined by commas.")
    ] = None,
    n: Annotated[
        int, typer.Option("--n", "-n", help="Fresh items per task of the confirmation.")
    ] = 200,
    first: Annotated[int, typer.Option(help="Items per task of the first round.")] = 8,
    confidence: Annotated[float, typer.Option(help="Of the statement.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of the items.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Save the plan and its figures (.json).")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Keep answers here; a rerun with the same FILE goes on."),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Processes that ask.")] = 1,
    device: DeviceOption = None,
    dtype: Annotated[str | None, typer.Option(help="As in bench.")] = None,
    threads: ThreadsOption = None,
) -> None:
    """Find the cheapest plan that keeps a share of the full cache's accuracy.

    Successive halving over methods and budgets; the finalists are confirmed on fresh items. Exit
    code 1 if no plan is shown to keep it.

    conduit-kv tune --task board-follow-up --target 0.95 --out plan.json
    """
    from conduit_kv.budget import Budget
    from conduit_kv.errors import InputError
    from conduit_kv.tasks import get_task

    check_target(out, (".json",))
    check_target(json, (".json",))
    tasks = tuple(name.strip() for part in task for name in part.split(",") if name.strip())
    for name in tasks:
        get_task(name)
    most = None
    if max_bytes is not None:
        limit = Budget.parse(max_bytes)
        if limit.unit != "bytes":
            raise InputError(f"--max-bytes {max_bytes}: write a number with a unit, as in 4MB")
        most = limit.value

    from conduit_kv.bench.parallel import Processes, Source
    from conduit_kv.bench.sweep import plans_of
    from conduit_kv.bench.tune import BUDGETS, CANDIDATES, Goal, save
    from conduit_kv.bench.tune import tune as search

    given = [part.strip() for value in budget or () for part in value.split(",") if part.strip()]
    texts = tuple(plan or CANDIDATES)
    budgets = tuple(given) or (BUDGETS if any("{}" in text for text in texts) else ())
    plans = plans_of(texts, budgets)
    goal = Goal(target, most, confidence)
    source = Source(model, device, dtype or ("float32" if model == "embedded" else "auto"), threads)
    tuned = search(
        source.load(),
        tasks,
        plans,
        goal,
        first=first,
        most=n,
        seed=seed,
        file=json,
        crew_of=lambda settings: Processes(source, settings, workers) if workers > 1 else None,
        progress=lambda what, plans: typer.echo(f"{plans} plans, {what}", err=True),
    )
    console().print(_table(tuned))
    typer.echo(tuned.statement())
    if out is not None:
        save(tuned, out)
        typer.echo(f"saved in {out}")
    if tuned.plan is None:
        raise typer.Exit(1)


def _table(tuned: Tuned) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    sure = f"{100 * tuned.goal.confidence:g} %"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("plan", overflow="fold")
    for column in ("K/V", "accuracy", "keeps", f"at least ({sure})", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in tuned.standings:
        mark = "[bold green]" if each.plan == tuned.plan else ""
        table.add_row(
            f"{mark}{each.plan}",
            size_text(each.kv_bytes),
            f"{each.accuracy:.3f} of {each.full:.3f}",
            f"{100 * each.share:.1f} %",
            f"{100 * each.at_least:.1f} %",
            str(each.n),
        )
    return table
