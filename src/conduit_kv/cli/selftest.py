"""``conduit-kv selftest``: is Conduit right on this model?"""

from __future__ import annotations

import typer

from conduit_kv.cli.common import DeviceOption, DtypeOption, ModelOption, guarded, load_vlm


@guarded
def selftest(
    model: ModelOption = "embedded", device: DeviceOption = None, dtype: DtypeOption = "auto"
) -> None:
    """Check on a model itself that plans do what they say; exit code 1 if one check fails."""
    result = load_vlm(model, device, dtype).selftest()
    typer.echo(str(result))
    if not result.passed:
        failed = sum(not check.passed for check in result.checks)
        typer.echo(f"{failed} of {len(result.checks)} checks failed", err=True)
        raise typer.Exit(1)
    typer.echo(f"all {len(result.checks)} checks passed")
