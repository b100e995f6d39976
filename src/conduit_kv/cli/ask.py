"""``conduit-kv ask``: one question about some images, and what was kept for it."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from conduit_kv.cli.common import (
    PICTURES,
    DeviceOption,
    DtypeOption,
    HeldOption,
    ModelOption,
    ThreadsOption,
    bars,
    check_target,
    console,
    guarded,
    load_vlm,
    share_text,
)

if TYPE_CHECKING:
    from rich.table import Table

    from conduit_kv.engine.report import Report
    from conduit_kv.engine.runner import Reply
    from conduit_kv.engine.sampling import Sampling
    from conduit_kv.engine.session import Session
    from conduit_kv.images import ImageLike
    from conduit_kv.videos import Video


@guarded
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="An image; repeat for several, in order."),
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option("--video", help="A video, shown after the images; may be repeated."),
    ] = None,
    frames: Annotated[int, typer.Option(min=1, help="Most frames taken of a video.")] = 32,
    plan: Annotated[
        str, typer.Option("--plan", "-p", help='For example "tgv-kv:0.2"; see `methods`.')
    ] = "full",
    model: ModelOption = "embedded",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest, up to this mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option("--stream/--no-stream", help="Print the answer as it comes."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print answer and report as JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Write a picture of what each layer kept.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Folder of stored images, made if missing; for plans that reuse (conduit:0.1)."
        ),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Whose stored images these are.")] = "",
    held: HeldOption = None,
    explain_plan: Annotated[
        bool,
        typer.Option("--explain-plan", help="First print what the plan keeps of this prompt."),
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Answer one question about some images, and say what was kept.

    conduit-kv ask "What is in row 1, column 2?" -i board.png --plan tgv-kv:0.2
    """
    from conduit_kv.images import read_image
    from conduit_kv.videos import read_video

    # Everything that can be wrong is looked at before the model is loaded.
    check_target(picture, PICTURES)
    pictures = [read_image(path) for path in image or []]
    films = [read_video(path, frames) for path in video or []]

    from conduit_kv.engine.sampling import Sampling
    from conduit_kv.errors import InputError
    from conduit_kv.plan import Plan

    parsed = Plan.of(plan)
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    if max_new_tokens < 1:
        raise InputError(f"--max-new-tokens is {max_new_tokens}: ask for at least one")
    if films and (picture is not None or explain_plan):
        raise InputError("--picture and --explain-plan are for images: leave --video out")
    parsed.check_store(store)
    if tenant and store is None:
        raise InputError("--tenant says whose stored images these are: add --store FOLDER")
    if held is not None and store is None:
        raise InputError("--held says how stored images are kept: add --store FOLDER")
    kept = None
    if store is not None:
        from conduit_kv.reuse.store import Store

        kept = Store(store, tenant=tenant, held=held)
    vlm = load_vlm(model, device, dtype, threads)
    session = vlm.session(parsed, store=kept)
    if explain_plan:
        from conduit_kv.cli.explain import explain

        prompt = [
            {
                "role": "user",
                "content": [*({"type": "image"} for _ in pictures), _text(question)],
            }
        ]
        for line in explain(vlm, parsed, vlm.process(vlm.render(prompt), pictures)):
            typer.echo(line, err=json)
    shown = sys.stdout.isatty() if stream is None else stream
    reply = _answer(
        session, question, pictures, films, max_new_tokens, sampling, stop or [], shown, json
    )
    if json:
        answer = {
            "text": reply.text,
            "tokens": list(reply.tokens),
            "finish": reply.finish,
            "report": reply.report.to_dict(),
        }
        typer.echo(json_text.dumps(answer, ensure_ascii=False))
    else:
        out = console()
        out.print()
        out.print(reply.report)
        if len(reply.report.sequences[0].images) > 1:
            out.print(_by_image(reply.report))
    for note in kept.notes if kept is not None else []:
        typer.echo(f"note: {note}", err=True)
    if picture is not None and session.state is not None:
        from conduit_kv.picture import center_crop, draw_retention

        draw_retention(session.state.cache, pictures, picture, center_crop=center_crop(vlm))
        if not json:
            typer.echo(f"picture: {picture}")


def _text(question: str) -> dict[str, str]:
    return {"type": "text", "text": question}


def _answer(
    session: Session,
    question: str,
    pictures: Sequence[ImageLike],
    films: Sequence[Video],
    max_new_tokens: int,
    sampling: Sampling,
    stop: list[str],
    shown: bool,
    json: bool,
) -> Reply:
    pieces = session.stream(
        question,
        pictures,
        videos=films,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop=stop,
    )
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            reply: Reply = end.value
            break
        if shown and not json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if not json:
        typer.echo("" if shown else reply.text)
    return reply


def _by_image(report: Report) -> Table:
    from rich.table import Table

    table = Table(title="by image", title_justify="left")
    table.add_column("image", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("kept (mean over layers)", justify="right")
    table.add_column("by layer")
    (sequence,) = report.sequences
    for number, tokens in enumerate(sequence.images):
        held = [layer.images[number] for layer in sequence.layers]
        mean = sum(held) / max(len(held), 1)
        table.add_row(
            str(number + 1),
            str(tokens),
            f"{mean:.1f} ({share_text(mean, tokens)})",
            bars([value / max(tokens, 1) for value in held]),
        )
    return table
