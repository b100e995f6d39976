"""Where Conduit keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder for Conduit, by the XDG convention: ``~/.cache/conduit-kv``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "conduit-kv"
