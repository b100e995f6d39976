"""``conduit-kv demo``: real questions with the whole cache and with a small part of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from conduit_kv.cli.common import (
    PICTURES,
    DeviceOption,
    DtypeOption,
    ModelOption,
    ThreadsOption,
    check_target,
    console,
    guarded,
    load_vlm,
    seconds_text,
    share_text,
    size_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from conduit_kv.engine.vlm import VLM
    from conduit_kv.picture import Retention
    from conduit_kv.plan import Plan
    from conduit_kv.tasks import Item, Task

PLANS = ("full", "tgv-kv:0.5", "tgv-kv:0.2", "tgv-kv:0.1", "tgv-kv:0.05")
QUESTIONS = (
    ("A dense board", "board", 1),
    ("A sparse board", "board-sparse", 0),
    ("A picture of easy-VQA", "easy-vqa", 0),
    ("Four images", "haystack-4", 0),
    ("A second question, answered from what the first one left", "board-follow-up", 0),
    ("A long answer", "board-list", 0),
)
"""Title, task, and which of its items."""

_BESIDE = 40
"""Longest answer that is shown in the table."""


@dataclass(frozen=True)
class _Line:
    """What one plan did with one question."""

    text: str
    score: float
    kept: float
    total: int
    kv_bytes: int
    first_token: float
    per_token: float
    retention: Retention


@guarded
def demo(
    picture: Annotated[
        Path, typer.Option(help="Where the picture of what each layer kept goes.")
    ] = Path("conduit-demo.png"),
    model: ModelOption = "embedded",
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Ask real questions with the full cache, then with 50, 20, 10 and 5 % of it (TGV-KV).

    Needs `conduit-kv setup embedded` once, and no network after that.
    """
    check_target(picture, PICTURES)
    out = console()
    out.print("loading the model ...")

    from rich.markup import escape

    from conduit_kv.picture import center_crop, draw_retention
    from conduit_kv.plan import Plan
    from conduit_kv.tasks import get_task

    vlm = load_vlm(model, device, dtype, threads)
    plans = [Plan.of(text) for text in PLANS]
    _warm_up(vlm)
    right = [0.0] * len(plans)
    drawn = False
    for title, name, number in QUESTIONS:
        task = get_task(name)
        item = task.items(number + 1)[number]
        lines = [_run(vlm, task, item, plan) for plan in plans]
        right = [so_far + line.score for so_far, line in zip(right, lines, strict=True)]
        out.print()
        out.print(f"[bold]{title}[/] ({name})")
        if item.first is not None:
            out.print(f"first: {item.first[0]}  [dim]{item.first[1]}[/]")
        out.print(f"question: {item.question}  [dim]right answer: {item.answer}[/]")
        # Long answers get the whole width, below.
        beside = max(len(line.text) for line in lines) <= _BESIDE
        out.print(_table(plans, lines, beside))
        for plan, line in zip(plans, lines, strict=True):
            if not beside:
                out.print(f"[bold]{plan!s:12}[/] {escape(line.text)}")
        if not drawn:
            kept = [line.retention for line in lines[1:]]
            draw_retention(kept, item.images, picture, center_crop=center_crop(vlm))
            drawn = True
    out.print()
    for plan, score in zip(plans, right, strict=True):
        out.print(f"{plan!s:12} {score:.2g} of {len(QUESTIONS)} right")
    out.print(
        "\nThe first word of an answer is chosen while the prompt is read, before anything is "
        "evicted; a second question and a long answer show what eviction costs. "
        "`conduit-kv bench` measures it."
    )
    out.print(f"What each layer kept of the dense board: {picture}")


def _run(vlm: VLM, task: Task, item: Item, plan: Plan) -> _Line:
    from conduit_kv.bench import prompt_of
    from conduit_kv.picture import Retention

    prompt = prompt_of(vlm, item, task.protocol)
    state = vlm.prefill(prompt.head, plan)
    first_token = state.seconds["first_token"]
    report, retention = state.report, Retention.of(state.cache)
    if prompt.rest is not None:
        start = time.perf_counter()
        vlm.extend_together([state], prompt.rest, evict=prompt.evict_rest)
        first_token = time.perf_counter() - start
    start = time.perf_counter()
    (tokens,) = vlm.decode_together([state], prompt.max_new_tokens)
    spent = time.perf_counter() - start
    text = str(vlm.tokenizer.decode(tokens, skip_special_tokens=True)).strip()
    (sequence,) = report.sequences
    return _Line(
        text,
        task.score(text, item),
        sequence.kept,
        sequence.tokens,
        report.kv_bytes,
        first_token,
        spent / max(len(tokens), 1),
        retention,
    )


def _warm_up(vlm: VLM) -> None:
    """One tiny question, so that the first line is timed like the others."""
    from PIL import Image

    vlm.ask("What is this?", [Image.new("RGB", (224, 224), "white")], max_new_tokens=2)


def _table(plans: list[Plan], lines: list[_Line], beside: bool) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    for column in ("kept", "of", "K/V", "first token", "per token"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    if beside:
        table.add_column("answer")
    for plan, line in zip(plans, lines, strict=True):
        table.add_row(
            str(plan),
            f"{line.kept:.0f} ({share_text(line.kept, line.total)})",
            str(line.total),
            size_text(line.kv_bytes),
            seconds_text(line.first_token),
            seconds_text(line.per_token),
            _mark(line.score),
            *([escape(line.text)] if beside else []),
        )
    return table


def _mark(score: float) -> str:
    if score >= 1:
        return "[green]✓[/]"
    return "[red]✗[/]" if score <= 0 else f"[yellow]{100 * score:.0f} %[/]"
