"""Packages that only some commands need: an absent one is named with the command that brings it."""

from __future__ import annotations

import importlib
from typing import Any

from conduit_kv.errors import InputError

__all__ = ["need"]


def need(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional dependency.

    Parameters
    ----------
    module : str
    extra : str
        The extra of this package that brings it.
    purpose : str
        What it is needed for, as the subject of the error.

    Raises
    ------
    InputError
        If it is not installed; the message has the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name and not module.startswith(error.name):
            raise  # installed, but broken: its own message says more
        raise InputError(
            f"{purpose} needs {module.partition('.')[0]}: pip install 'conduit-kv[{extra}]'"
        ) from None
