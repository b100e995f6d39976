"""``conduit-kv report``: one page from results, which says which plan to take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from conduit_kv.cli.common import check_target, guarded


@guarded
def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="Files that `bench --json` wrote, or folders of them."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page, ending in .html.")] = Path(
        "report.html"
    ),
    margin: Annotated[
        float, typer.Option(help="Loss of accuracy that a recommended plan may have, in points.")
    ] = 5.0,
    title: Annotated[str, typer.Option(help="The page's heading.")] = "What a KV cache can lose",
) -> None:
    """Make one page of bench results: a plan per usage, and the figures behind it.

    The page is a single file and needs no network.

    conduit-kv report benchmarks/results/headline -o report.html
    """
    from conduit_kv.errors import InputError

    check_target(out, (".html", ".htm"))
    if not 0 <= margin < 100:
        raise InputError(f"--margin {margin:g}: points of accuracy, from 0 to 100")

    from conduit_kv.report import advise, load, write_page

    found = load(results)
    write_page(found, out, margin=margin / 100, title=title)
    for model in found.models:
        for advice in advise(found, model, margin / 100):
            pick = advice.pick()
            chosen = f"{pick.plan}, {100 * pick.share:.0f} % of the bytes" if pick else "full"
            typer.echo(f"{model}, {advice.usage.title.lower()}: {chosen}")
    typer.echo(f"report: {out}")
