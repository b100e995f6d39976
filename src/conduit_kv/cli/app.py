"""All commands as one application."""

from __future__ import annotations

import typer

from conduit_kv.cli.ask import ask
from conduit_kv.cli.bench import bench
from conduit_kv.cli.demo import demo
from conduit_kv.cli.fit import fit
from conduit_kv.cli.methods import methods
from conduit_kv.cli.paper import paper
from conduit_kv.cli.profile import profile
from conduit_kv.cli.report import report
from conduit_kv.cli.selftest import selftest
from conduit_kv.cli.setup import setup
from conduit_kv.cli.store import store
from conduit_kv.cli.tune import tune

__all__ = ["app"]

app = typer.Typer(
    name="conduit-kv",
    help="Cheap vision-language inference by working on the visual tokens' KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def version(
    show: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True),
) -> None:
    """Cheap vision-language inference by working on the visual tokens' KV cache."""
    if show:
        import conduit_kv

        typer.echo(f"conduit-kv {conduit_kv.__version__}")
        raise typer.Exit


app.command()(demo)
app.command()(ask)
app.command()(methods)
app.command()(selftest)
app.command()(bench)
app.command()(report)
app.add_typer(fit, name="fit")
app.command()(tune)
app.command()(profile)
app.add_typer(store, name="store")
app.command()(paper)
app.add_typer(setup, name="setup")
