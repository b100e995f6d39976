"""``conduit-kv methods``: what there is, stage by stage."""

from __future__ import annotations

import dataclasses
import inspect
import json as json_text
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conduit_kv.cli.common import console, guarded

if TYPE_CHECKING:
    from conduit_kv.methods import Method

STAGES = {
    "reuse": ("stored K/V of an image, before the prefill", "visual tokens refreshed"),
    "reduce": (
        "image embeddings, before the language model",
        "visual tokens active, mean over layers",
    ),
    "route": (
        "hidden states between decoder layers, during the prefill",
        "visual tokens active, mean over layers",
    ),
    "evict": (
        "K/V of a layer, after the prefill and in decoding",
        "prompt tokens kept, mean over layers; with of=visual visual tokens, and all text besides",
    ),
    "hold": ("how kept K/V are stored", "bits, or a share of floats (kvcapsule)"),
    "retrieve": ("which held tokens a question sees", "visual tokens in total"),
}
"""Per stage: what it acts on, and what its budget counts."""


@guarded
def methods(
    name: Annotated[str | None, typer.Argument(help="Say everything about this one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List the methods that plans can name, with budgets, options and papers."""
    if name is not None:
        from conduit_kv.methods.catalogue import find

        _describe(find(name), json)
        return
    if json:
        from conduit_kv.methods import registry

        typer.echo(json_text.dumps([_plain(method) for method in registry().values()]))
        return
    _list()


def _list() -> None:
    from rich.table import Table

    from conduit_kv.methods import registry
    from conduit_kv.methods.catalogue import NAMES

    out = console()
    out.print("A plan is at most one method per stage, joined by +, for example:")
    out.print(
        "  [bold]tgv-kv:0.2[/]      keep 20 %      [bold]snapkv:128(window=16)[/]  128 tokens"
    )
    out.print("A decimal is a share (1.0 is all), an integer tokens, a number with a unit bytes.")
    known = registry()
    for stage, (acts_on, counts) in STAGES.items():
        mine = [known[name] for name in NAMES[stage] if name in known]
        mine += [m for m in known.values() if m.stage == stage and m not in mine]
        out.print(f"\n[bold]{stage}[/] acts on {acts_on}")
        shared = _shared(mine)
        out.print(f"budget: {counts}")
        if shared:
            out.print(f"all of them take: {', '.join(_option(f) for f in shared.values())}")
        table = Table(show_lines=False, pad_edge=False)
        for column in ("method", "options", "in decoding", "paper"):
            table.add_column(column, overflow="fold")
        for method in mine:
            own = [f for f in _options(method) if f.name not in shared]
            name = method.name + (":…" if method.takes_budget() else "")
            table.add_row(
                name + (" *" if method.basis != "known" else ""),
                ", ".join(_option(f) for f in own) or "-",
                method.in_decode,
                method.paper.removeprefix("https://").replace("arxiv.org/abs/", "arXiv:")
                or "control",
            )
        out.print(table)
    out.print(
        "\n* details not in the paper are our reconstruction. `conduit-kv methods NAME`: more."
    )


def _describe(method: type[Method], json: bool) -> None:
    if json:
        typer.echo(json_text.dumps(_plain(method)))
        return
    acts_on, counts = STAGES[method.stage]
    typer.echo(f"{method.name}: stage {method.stage}, acts on {acts_on}")
    if method.takes_budget():
        typer.echo(f"budget: {counts}")
    for field in _options(method):
        typer.echo(f"  {_option(field)}")
    typer.echo(f"in decoding: {method.in_decode}")
    if method.paper:
        typer.echo(f"paper: {method.paper} ({method.basis})")
    typer.echo("\n" + (inspect.getdoc(method) or ""))


def _options(method: type[Method]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(method) if field.name != method.budget_field]


def _option(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if isinstance(default, bool) or default is None:
        return f"{field.name}={str(default).lower()}"
    return f"{field.name}={default}"


def _shared(mine: list[type[Method]]) -> dict[str, dataclasses.Field[Any]]:
    """Options that all methods of a stage have, with the same default."""
    first, *rest = [{field.name: field for field in _options(method)} for method in mine]
    if not rest:
        return {}
    return {
        name: field
        for name, field in first.items()
        if all(name in other and other[name].default == field.default for other in rest)
    }


def _plain(method: type[Method]) -> dict[str, Any]:
    return {
        "name": method.name,
        "stage": method.stage,
        "budget": STAGES[method.stage][1] if method.takes_budget() else None,
        "options": {field.name: field.default for field in _options(method)},
        "in_decode": method.in_decode,
        "paper": method.paper,
        "basis": method.basis,
    }
