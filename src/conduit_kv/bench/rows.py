"""Rows as a table in a file: JSON Lines or Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conduit_kv.errors import InputError
from conduit_kv.extras import need

__all__ = ["ENDINGS", "read_rows", "write_rows"]

ENDINGS = (".jsonl", ".parquet")


def write_rows(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write rows, in one piece.

    Parameters
    ----------
    rows : sequence of dict
        As the bench makes them; nested values stay nested.
    file : Path
        Ends in ``.jsonl`` or ``.parquet`` (which needs the extra ``bench``).
    """
    part = file.with_name(file.name + ".part")
    if file.suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        part.write_text("".join(lines), encoding="utf-8")
    elif file.suffix == ".parquet":
        arrow = need("pyarrow", "bench", "a Parquet file")
        parquet = need("pyarrow.parquet", "bench", "a Parquet file")
        names = dict.fromkeys(name for row in rows for name in row)
        table = arrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
        parquet.write_table(table, part)
    else:
        raise InputError(f"{file}: name a file that ends in {' or '.join(ENDINGS)}")
    os.replace(part, file)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read what :func:`write_rows` wrote.

    Raises
    ------
    InputError
        If the file cannot be read.
    """
    try:
        if file.suffix == ".jsonl":
            lines = file.read_text(encoding="utf-8").splitlines()
            return [dict(json.loads(line)) for line in lines]
        parquet = need("pyarrow.parquet", "bench", "a Parquet file")
        rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
        return rows
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
