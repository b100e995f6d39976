"""What the commands share: errors in one line, loading, checks before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar

import typer

from conduit_kv.errors import ConduitError, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from conduit_kv.engine.vlm import VLM

P = ParamSpec("P")
R = TypeVar("R")

ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", help='"embedded", a name on the Hugging Face hub, or a folder.'),
]
DeviceOption = Annotated[
    str | None, typer.Option(help='"cpu", "cuda", ...; by default CUDA where there is one.')
]
DtypeOption = Annotated[
    str, typer.Option(help='"auto" (as the weights are stored), float32, bfloat16 or float16.')
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; by default as many as PyTorch takes.")
]
HeldOption = Annotated[
    str | None,
    typer.Option(
        help="How stored images are kept: full, int8, or as a hold method does: kivi:4. By default "
        "as the folder keeps them."
    ),
]


def complain(problem: object) -> None:
    """Say what is wrong, on stderr, in one line."""
    typer.echo("conduit-kv: " + " ".join(str(problem).split()), err=True)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """End a command with exit code 2 on a user's error and 130 on Ctrl-C, without a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ConduitError as error:
            complain(error)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            complain("stopped")
            raise typer.Exit(130) from None

    return run


def console(*, stderr: bool = False) -> Console:
    """A console; where nobody watches (a file, a pipe) it is 100 columns wide."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=100)


def load_vlm(
    model: str, device: str | None = None, dtype: str = "auto", threads: int | None = None
) -> VLM:
    """Load a model, without what Transformers says while it loads."""
    from conduit_kv.bench.parallel import Source

    return Source(model, device, dtype, threads).load()


def check_target(path: Path | None, endings: Sequence[str] = ()) -> None:
    """Raise InputError now if a file could not be written at the end."""
    if path is None:
        return
    folder = path.expanduser().absolute().parent
    if not folder.is_dir():
        raise InputError(f"{path}: there is no folder {folder} to write into")
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file")
    if endings and path.suffix.lower() not in endings:
        raise InputError(f"{path}: name a file that ends in {', '.join(endings)}")


PICTURES = (".png", ".jpg", ".jpeg", ".webp")
"""Endings of the pictures that can be written."""


def size_text(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def share_text(part: float, whole: float) -> str:
    """A share in per cent."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def seconds_text(seconds: float | None) -> str:
    """Seconds as people read them."""
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def bars(shares: Sequence[float]) -> str:
    """A bar per share in [0, 1]."""
    ramp = " ▁▂▃▄▅▆▇█"
    return "".join(ramp[min(8, max(1, round(8 * share))) if share > 0 else 0] for share in shares)
