"""``conduit-kv paper``: run a published table, or try out that it can be run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from conduit_kv.cli.common import guarded


@guarded
def paper(
    file: Annotated[Path, typer.Argument(help="A table, as benchmarks/papers/*.yaml.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run its plans small, and print what would be run.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="A folder for results.")] = Path(
        "out/papers"
    ),
    limit: Annotated[int | None, typer.Option(min=1, help="Documents per lmms-eval task.")] = None,
) -> None:
    """Run a published table on its own models and benchmarks.

    conduit-kv paper benchmarks/papers/tgv-kv-table-2.yaml --dry-run
    """
    from conduit_kv.bench.papers import commands, read_paper, run_commands
    from conduit_kv.bench.sweep import Sweep
    from conduit_kv.cli.bench import measure

    found = read_paper(file)
    typer.echo(f"{found.title}, {found.table} ({found.link})")
    for figure in found.published:
        place = ", ".join(f"{v}" for k, v in figure.items() if k not in ("plan", "value"))
        typer.echo(f"  published: {place}: {figure['plan']} {figure['value']}")
    folder = out / file.stem
    lines = commands(found, folder, limit)

    def run(sweep: Sweep, where: Path) -> None:
        where.mkdir(parents=True, exist_ok=True)
        measure(sweep, where)

    if dry_run:
        for line in lines:
            typer.echo(f"  would run: {shlex.join(line)}")
        run(found.dry, folder / "dry")
        return
    if found.sweep.tasks:
        run(found.sweep, folder)
    run_commands(lines)
    typer.echo(f"results in {folder}")
