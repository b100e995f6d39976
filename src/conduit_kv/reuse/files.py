"""An entry as bytes: a safetensors file whose header says what it is, with a checksum."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from conduit_kv.digests import checksum
from conduit_kv.layout import Grid, View
from conduit_kv.methods.hold import HoldMethod
from conduit_kv.reuse.entry import VERSION
from conduit_kv.reuse.held import FULL, Held, kind_of
from conduit_kv.reuse.keys import Key

FORMAT = "conduit-kv entry"
FILE_VERSION = 1
"""Of the file; another version is a miss."""


class Damaged(Exception):
    """Bytes that are no entry, or not the wanted one.

    Attributes
    ----------
    remove : bool
        Whether nobody can use them.
    """

    def __init__(self, reason: str, *, remove: bool = True) -> None:
        super().__init__(reason)
        self.remove = remove


def dump(key: Key, held: Held) -> bytes:
    """A file's bytes."""
    from safetensors.torch import save

    tensors = {name: tensor.contiguous() for name, tensor in held.tensors.items()}
    header = {
        "format": FORMAT,
        "file_version": str(FILE_VERSION),
        "key": json.dumps(asdict(key), sort_keys=True),
        "digest": held.digest,
        "kind": held.kind,
        "dtype": held.dtype,
        "grid": json.dumps(held.grid and asdict(held.grid), sort_keys=True),
        "seconds": repr(held.seconds),
    }
    header["checksum"] = checksum(header, tensors)
    return bytes(save(tensors, metadata=header))


def header_of(data: bytes) -> dict[str, str]:
    """The header of a file, read from its first bytes.

    Raises
    ------
    Damaged
        If these are not the first bytes of an entry.
    """
    size = int.from_bytes(data[:8], "little")
    try:
        header: dict[str, str] = json.loads(data[8 : 8 + size])["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged("it is no entry, or is cut off") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise Damaged("it is no entry")
    if header.get("file_version") != str(FILE_VERSION):
        raise Damaged(
            f"it has version {header.get('file_version')} of the format, and this is version "
            f"{FILE_VERSION}: it is computed again when it is needed",
            remove=False,
        )
    return header


def parse(data: bytes, key: Key | None, method: HoldMethod = FULL) -> Held:
    """What a file holds, checked in every respect.

    Parameters
    ----------
    data : bytes
    key : Key or None
        The wanted one; None to check the file alone.
    method : HoldMethod
        How the wanted one is held.

    Raises
    ------
    Damaged
        If it is damaged, cut off, of another version, or the entry of something else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    header = header_of(data)
    try:
        tensors = load(data)
        stored = Key(**json.loads(header["key"]))
        grid = _grid(json.loads(header["grid"]))
        seconds = float(header["seconds"])
        expected = header["checksum"]
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Damaged(f"it is damaged: {error}") from None
    if checksum(header, tensors) != expected:
        raise Damaged("its checksum does not fit: it is damaged")
    if key is not None and stored != key:
        raise Damaged("it is the entry of something else")
    if stored.digest != header["digest"] or stored.version != VERSION:
        raise Damaged("it is an entry of another version", remove=False)
    kind = kind_of(method)
    if key is not None and header["kind"] != kind:
        raise Damaged(f"it is held as {header['kind']}, and this store holds {kind}", remove=False)
    held = Held(method, tensors, header["digest"], grid, header["dtype"], seconds)
    fits = tensors["features"].shape[0] == stored.tokens
    fits &= len(tensors.get("bits", tensors["keys"][0, 0])) == stored.tokens
    if not fits or tensors["values"].shape[:3] != tensors["keys"].shape[:3]:
        raise Damaged("its tensors do not fit together")
    return held


def _grid(data: dict[str, Any] | None) -> Grid | None:
    if data is None:
        return None
    views = tuple(View(**view) for view in data.pop("views"))
    return Grid(**data, views=views)
