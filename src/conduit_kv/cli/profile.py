"""``conduit-kv profile``: where time and memory go, and when a plan pays."""

from __future__ import annotations

import json as json_text
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conduit_kv.cli.common import (
    DeviceOption,
    DtypeOption,
    ModelOption,
    ThreadsOption,
    check_target,
    console,
    guarded,
    load_vlm,
    seconds_text,
    size_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from conduit_kv.bench.forecast import Forecast, Shape
    from conduit_kv.bench.profile import Profile
    from conduit_kv.plan import Plan


@guarded
def profile(
    plan: Annotated[str, typer.Option("--plan", "-p", help="The plan beside full.")],
    model: ModelOption = "embedded",
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            help="Forecast from a configuration alone, without weights: a config.json, a folder, "
            "or qwen3-vl-8b, internvl3-9b, llava-next-7b; repeat for several.",
        ),
    ] = None,
    images: Annotated[int, typer.Option("--images", min=1, help="Of the longest prompt.")] = 16,
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Tokens answered.")] = 64,
    sizes: Annotated[
        str | None, typer.Option(help="With --config: visual tokens, joined by commas.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; medians are printed.")] = 3,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write a page with the plot (.html).")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Show where time and memory go under a plan, and from how many images on it pays.

    conduit-kv profile --plan tgv-kv:0.2 --images 16 --tokens 64

    conduit-kv profile --config qwen3-vl-8b --plan tgv-kv:0.2 -o forecast.html
    """
    from conduit_kv.errors import InputError

    check_target(out, (".html", ".htm"))
    check_target(json, (".json",))
    if config is None and (sizes or out):
        raise InputError("--sizes and --out belong to a forecast: name a --config")

    from conduit_kv.plan import Plan

    chosen = Plan.of(plan)
    if config is not None:
        _forecast(chosen, config, sizes, out, json)
        return
    from conduit_kv.bench.profile import profile as run

    vlm = load_vlm(model, device, dtype, threads)
    found = run(
        vlm, chosen, images, tokens, repeats, lambda what: typer.echo(f"measuring {what}", err=True)
    )
    console().print(_measured(found))
    for line in found.verdict():
        typer.echo(line)
    for note in found.plan[-1].notes:
        typer.echo(f"note: {note}")
    if json is not None:
        json.write_text(json_text.dumps(found.to_dict(), indent=1))


def _measured(found: Profile) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{found.model}, {found.new} tokens answered"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("images", "tokens", "plan"):
        table.add_column(column, justify="right" if column != "plan" else "left", overflow="fold")
    for column in ("encode", "prefill", "per token", "whole", "GFLOP", "K/V", "of a step"):
        table.add_column(column, justify="right", no_wrap=True)
    for pair in zip(found.full, found.plan, strict=True):
        for each in pair:
            table.add_row(
                str(each.images),
                str(each.tokens),
                each.plan,
                seconds_text(each.encode_s),
                seconds_text(each.prefill_s),
                seconds_text(each.step_s),
                seconds_text(each.total(found.new)),
                f"{each.prefill_flops / 1e9:.0f}",
                size_text(each.kv_bytes),
                f"{100 * each.kv_share:.0f} %",
            )
    kinds = ", ".join(f"{k} {size_text(v)}" for k, v in found.plan[-1].bytes_by_kind.items())
    table.caption = f"of a step: K/V among the bytes that it reads. Allocated at last: {kinds}"
    table.caption_justify = "left"
    return table


def _forecast(
    plan: Plan, configs: list[str], sizes: str | None, out: Path | None, json: Path | None
) -> None:
    from conduit_kv.bench.forecast import SIZES, forecast, shape_of
    from conduit_kv.errors import InputError

    try:
        wanted = [int(part) for part in sizes.split(",")] if sizes else list(SIZES)
    except ValueError:
        raise InputError(f"--sizes {sizes}: write whole numbers, as in 1000,64000") from None
    if any(size < 1 for size in wanted):
        raise InputError(f"--sizes {sizes}: a prompt has at least one visual token")
    found = [(shape, forecast(shape, plan, wanted)) for shape in map(shape_of, configs)]
    for shape, rows in found:
        console().print(_forecast_table(shape, plan, rows))
    if json is not None:
        json.write_text(json_text.dumps([_plain(*each) for each in found], indent=1))
    if out is not None:
        from conduit_kv.report.forecast import write_forecast

        write_forecast(found, plan, out)
        typer.echo(f"plot: {out}")


def _plain(shape: Shape, rows: list[Forecast]) -> dict[str, Any]:
    return {"model": asdict(shape), "rows": [asdict(row) for row in rows]}


def _forecast_table(shape: Shape, plan: Plan, rows: list[Forecast]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{shape.name}: weights {size_text(shape.weights)}, {shape.bits} bits; plan {plan}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in (
        "visual tokens", "K/V full", "K/V plan", "of a step", "step, at best", "prefill TFLOP",
        "with plan", "step GFLOP",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.visual:,}",
            size_text(row.kv_full),
            size_text(row.kv_plan),
            f"{100 * row.kv_share:.0f} %",
            f"{row.faster:.2f} x",
            f"{row.prefill_full / 1e12:.1f}",
            f"{row.prefill_plan / 1e12:.1f}",
            f"{row.step_full / 1e9:.1f} > {row.step_plan / 1e9:.1f}",
        )
    table.caption = (
        "of a step: the full K/V among the bytes that a decoding step reads at batch 1, weights "
        "besides. At best: where reading takes all the time. Accuracy is not forecast."
    )
    table.caption_justify = "left"
    return table
