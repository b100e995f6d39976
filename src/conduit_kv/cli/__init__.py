"""The command line: ``conduit-kv demo | ask | methods | selftest | bench | fit | setup``.

Nothing heavy is imported until a command runs, so that ``--help`` does not wait for PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conduit_kv.errors import ConduitError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Parameters
    ----------
    arguments : sequence of str, optional
        ``sys.argv[1:]`` if not given.

    Returns
    -------
    int
        Exit code: 0, 1 where a check failed, 2 for what the user can put right (one line on
        stderr), 130 after Ctrl-C.
    """
    import typer

    from conduit_kv.cli.app import app
    from conduit_kv.cli.common import complain

    try:
        code = app(args=arguments, prog_name="conduit-kv", standalone_mode=False)
    except ConduitError as error:
        complain(error)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        complain("stopped")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `conduit-kv ... | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # What the parser of the command line says of a wrong option, in one line like the rest.
        complain(error.format_message())
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0
