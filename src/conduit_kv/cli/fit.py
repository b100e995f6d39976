"""``conduit-kv fit``: learn from images what a method needs of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from conduit_kv.cli.common import (
    DeviceOption,
    ModelOption,
    ThreadsOption,
    check_target,
    console,
    guarded,
    load_vlm,
    size_text,
)

fit = typer.Typer(help="Learn from images what a method needs of a model.", no_args_is_help=True)


@fit.callback()
def _fit() -> None:
    """Learn from images what a method needs of a model."""


@fit.command()
@guarded
def kvcapsule(
    model: Annotated[str, typer.Option("--model", "-m", help="embedded, a name or a folder.")],
    images: Annotated[
        str, typer.Option("--images", help="A folder of pictures, easy-vqa, or boards.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The artefact's file (.safetensors).")],
    keep: Annotated[float, typer.Option("--keep", help="Show what this share would keep.")] = 0.4,
    n: Annotated[int, typer.Option("--n", help="Images to look at, at most.")] = 300,
    block: Annotated[int | None, typer.Option("--block", help="Tokens in a block.")] = None,
    device: Annotated[str | None, typer.Option("--device")] = None,
    threads: Annotated[int | None, typer.Option("--threads")] = None,
) -> None:
    """Fit KVCapsule's learned parts on a few hundred images; Ctrl-C keeps what was seen.

    One artefact serves every share: name it in a plan, kvcapsule:0.4(artefact=FILE).
    """
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    from conduit_kv.capsule import Moments
    from conduit_kv.capsule import fit as fitting
    from conduit_kv.errors import InputError

    if not 0 < keep <= 1:
        raise InputError(f"--keep {keep:g} is not a share in (0, 1]")
    check_target(out, (".safetensors",))
    pictures = _pictures(images, n)
    vlm = load_vlm(model, device=device, dtype="auto", threads=threads)
    with Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), TimeRemainingColumn()
    ) as bars:
        bar = bars.add_task("images", total=len(pictures))
        artefact = fitting.fit(
            vlm,
            pictures,
            out,
            block=block,
            progress=lambda done, total: bars.update(bar, completed=done),
        )
    moments = Moments.of(artefact)
    counts = moments.counts(keep)
    kept = sum(a + b for a, b in counts) / (2 * moments.block * len(counts))
    out_text = console()
    out_text.print(
        f"{out}: {artefact.config['images']} images, blocks of {moments.block}, "
        f"{size_text(out.stat().st_size)}"
    )
    out_text.print(f"at keep={keep:g}: {100 * kept:.1f} % of the numbers; per layer keys + values")
    out_text.print("  " + " ".join(f"{a}+{b}" for a, b in counts))


def _pictures(images: str, n: int) -> list[Any]:
    from itertools import islice

    from conduit_kv.capsule import fit as fitting
    from conduit_kv.errors import InputError

    found: list[Any]
    if images == "boards":
        found = list(islice(fitting.board_images(n), n))
    elif images == "easy-vqa":
        from conduit_kv.tasks import get_task

        items = get_task("easy-vqa").items(3 * n, seed=1000, split="train")
        found = list({item.image_keys: item.images[0] for item in items}.values())[:n]
    elif Path(images).expanduser().is_dir():
        found = fitting.image_files(Path(images).expanduser())[:n]
    else:
        raise InputError(f"--images {images}: name a folder, easy-vqa or boards")
    if not found:
        raise InputError(f"--images {images}: there are no pictures")
    return found


@fit.command()
@guarded
def retoken(
    out: Annotated[Path, typer.Option(help="File to write, *.safetensors.")],
    model: ModelOption = "embedded",
    data: Annotated[
        str,
        typer.Option(help='"board" (drawn boards), or a folder with questions.jsonl.'),
    ] = "board",
    questions: Annotated[int, typer.Option(min=3, help="Questions drawn for board.")] = 1200,
    images: Annotated[int, typer.Option(min=2, max=256, help="Images of a set for board.")] = 16,
    boards: Annotated[int, typer.Option(min=4, help="Boards that sets are drawn from.")] = 200,
    steps: Annotated[int, typer.Option(min=1)] = 400,
    batch: Annotated[int, typer.Option(min=1, help="Questions per step.")] = 16,
    depth: Annotated[
        list[float] | None,
        typer.Option(help="Scored layer, a share of the depth; repeat for more. [0.11 0.14 0.17]"),
    ] = None,
    space: Annotated[str, typer.Option(help="Score against stored values or keys.")] = "value",
    seed: int = 0,
    device: DeviceOption = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: ThreadsOption = None,
) -> None:
    """Train ReToken's one token; minutes on a CPU for the embedded model. Ctrl-C, then go on."""
    from conduit_kv.errors import InputError

    check_target(out, (".safetensors",))
    if space not in ("value", "key"):
        raise InputError(f"--space is value or key, not {space!r}")
    from conduit_kv.retrieve import fit as training

    depths = tuple(depth) if depth else training.Settings.depths
    scored: Literal["value", "key"] = "key" if space == "key" else "value"
    settings = training.Settings(steps, batch, depths, scored, seed=seed)
    if data == "board":
        known = training.board_data(questions, images, boards, seed)
    else:
        known = training.folder_data(Path(data))
    trainer = training.Trainer(load_vlm(model, device, dtype, threads), known, settings, out)
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        console=console(stderr=True),
    ) as bar:
        tasks: dict[str, int] = {}

        def show(what: str, done: int, of: int, loss: float | None) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            words = what if loss is None else f"{what}, loss {loss:.3f}"
            bar.update(tasks[what], completed=done, description=words)  # type: ignore[arg-type]

        artefact = trainer.run(show)
    recall = trainer.recall(artefact, known.examples[:200])
    typer.echo(
        f"wrote {out}: layers {artefact.config['scored_layers']}, loss "
        f"{artefact.config['loss']:.3f}, the best image is right for {100 * recall:.0f} % of "
        f"{min(200, len(known.examples))} training questions"
    )
