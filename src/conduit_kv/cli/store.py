"""``conduit-kv store``: look after stored images, and warm a folder of pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from conduit_kv.cli.common import (
    DeviceOption,
    DtypeOption,
    HeldOption,
    ModelOption,
    ThreadsOption,
    console,
    guarded,
    load_vlm,
    seconds_text,
    size_text,
)
from conduit_kv.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

    from conduit_kv.reuse.disk import DiskTier

store = typer.Typer(
    help="Images and text stored for reuse: list, check, prune, clear, or fill from a folder.",
    no_args_is_help=True,
)

FolderArgument = Annotated[Path, typer.Argument(help="The store's folder.")]
_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_DAY = 86_400.0


@store.command()
@guarded
def ls(folder: FolderArgument) -> None:
    """List what is stored, the most recently used first."""
    from rich.table import Table

    table = Table("entry", "of", "tokens", "size", "used", "computed in", "tenant", "model")
    for row in _open(folder).rows():
        table.add_row(
            row.digest[:12],
            row.kind,
            str(row.tokens),
            size_text(row.bytes),
            f"{row.uses} x",
            seconds_text(row.seconds),
            row.tenant or "-",
            " ".join(part[:12] if len(part) == 64 else part for part in row.model.split()),
        )
    console().print(table)


@store.command()
@guarded
def stat(folder: FolderArgument) -> None:
    """Say how much is stored, per tenant."""
    disk = _open(folder)
    rows = disk.rows()
    text = sum(row.kind == "text" for row in rows)
    kinds = f"{len(rows) - text} of images, {text} of text"
    typer.echo(f"{len(rows)} entries ({kinds}), {size_text(sum(row.bytes for row in rows))}; "
               f"K and V of images held as {disk.held_as()}")  # fmt: skip
    for tenant in sorted({row.tenant for row in rows}):
        mine = [row for row in rows if row.tenant == tenant]
        used = sum(row.uses for row in mine)
        name = repr(tenant) if tenant else "no tenant"
        size = size_text(sum(row.bytes for row in mine))
        typer.echo(f"  {name}: {len(mine)} entries, {size}, used {used} times")


@store.command()
@guarded
def verify(
    folder: FolderArgument,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is damaged.")] = False,
) -> None:
    """Read every entry and say what is wrong; exit code 1 if anything is."""
    disk = _open(folder)
    total, wrong = len(disk.rows()), 0
    with _progress() as bars:
        task = bars.add_task("verify", total=total)
        for digest, problem in disk.verify():
            bars.advance(task)
            if problem:
                wrong += 1
                bars.console.print(f"{digest[:12]}: {problem}")
                if remove:
                    disk.remove(digest)
    typer.echo(
        f"{wrong} of {total} entries cannot be used" if wrong else f"{total} entries, all good"
    )
    if wrong:
        raise typer.Exit(1)


@store.command()
@guarded
def prune(
    folder: FolderArgument,
    max_bytes: Annotated[
        str | None, typer.Option(help="Leave at most so much, for example 2GB.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, help="Remove what was made more than so many days ago.")
    ] = None,
) -> None:
    """Remove entries, the least recently used first."""
    from conduit_kv.reuse.store import bytes_of

    if max_bytes is None and older_than is None:
        raise InputError("say what to remove: --max-bytes 2GB, or --older-than 30 (days)")
    disk = _open(folder)
    before = disk.nbytes
    gone = disk.prune(
        max_bytes=None if max_bytes is None else bytes_of(max_bytes),
        older_than=None if older_than is None else older_than * _DAY,
    )
    typer.echo(f"{gone} entries removed, {size_text(before - disk.nbytes)}")


@store.command()
@guarded
def clear(
    folder: FolderArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove all entries."""
    disk = _open(folder)
    count = len(disk.rows())
    if not yes and not typer.confirm(f"Remove {count} entries of {folder}?"):
        raise typer.Exit(1)
    disk.clear()
    typer.echo(f"{count} entries removed")


@store.command()
@guarded
def warm(
    pictures: Annotated[Path, typer.Argument(help="A folder of pictures, read with its folders.")],
    into: Annotated[Path, typer.Option("--store", help="The store's folder; made if need be.")],
    model: ModelOption = "embedded",
    max_bytes: Annotated[str, typer.Option(help="The store's limit.")] = "8GB",
    tenant: Annotated[str, typer.Option(help="Whose entries these are.")] = "",
    held: HeldOption = None,
    bare: Annotated[
        bool, typer.Option("--bare", help="Without the chat template (context=none).")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Prefill every picture of a folder alone, so that later questions find it stored.

    conduit-kv store warm pictures/ --store cache/
    conduit-kv ask "Where is the bus?" -i pictures/a.png --plan conduit:0.1 --store cache/
    """
    from conduit_kv.images import read_image
    from conduit_kv.reuse.store import Store, bytes_of

    if not pictures.is_dir():
        raise InputError(f"{pictures}: no such folder")
    paths = list(_pictures(pictures))
    if not paths:
        raise InputError(f"{pictures} has no pictures ({', '.join(_ENDINGS)})")
    bytes_of(max_bytes)
    kept = Store(into, max_bytes=max_bytes, memory=0, tenant=tenant, held=held)
    vlm = load_vlm(model, device, dtype, threads)
    plan = "reuse-all(context=none)" if bare else "reuse-all"
    computed = stored = refused = 0
    with _progress() as bars:
        for path in bars.track(paths, description="warm"):
            try:
                image = read_image(path)
            except InputError as error:
                refused += 1
                bars.console.print(str(error))
                continue
            message = {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": "?"}],
            }
            state = vlm.prefill(vlm.process(vlm.render([message]), [image]), plan, store=kept)
            usage = state.report.reuse
            if usage is not None and usage.computed_tokens:
                computed += 1
            else:
                stored += 1
    for note in kept.notes:
        typer.echo(f"note: {note}", err=True)
    size = size_text(kept.disk.nbytes) if kept.disk is not None else "-"
    typer.echo(
        f"{computed} pictures computed, {stored} were there, {refused} refused; {into} holds {size}"
    )


def _pictures(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in _ENDINGS)


def _open(folder: Path) -> DiskTier:
    from conduit_kv.reuse.disk import DiskTier

    if not (folder / "index.sqlite").is_file():
        raise InputError(f"{folder} is no store: `conduit-kv store warm` makes one")
    return DiskTier(folder, 1 << 62)


def _progress() -> Progress:
    from rich.progress import MofNCompleteColumn, Progress

    return Progress(
        *Progress.get_default_columns(), MofNCompleteColumn(), console=console(stderr=True)
    )
