"""Which attention path is used where.

SDPA is the reference. On the CPU its decode kernel is slow in bf16, so that a plain grouped product
is faster. Which one wins depends on the processor, so it is measured: once per dtype, head shape
and size class, on the first call that needs it. The outcome is remembered in the user's cache
folder, so that a machine decides once and computes the same ever after.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from conduit_kv.folders import cache_folder

Path_ = Literal["sdpa", "grouped"]
_LARGEST = {"prefill": 2048, "decode": 16384}
"""Beyond this size the ranking does not change any more, and measuring takes long."""

_decided: dict[str, Path_] = {}


def choose(
    query: Tensor,
    keys: Tensor,
    slots: int,
    paths: dict[Path_, Callable[[Tensor, Tensor, Tensor, int], object]],
) -> Path_:
    """The path for ``query`` ``[B, H, n, d]`` over ``slots`` slots of ``keys`` ``[B, G, C, d]``.

    Parameters
    ----------
    paths : dict
        Each path as a function of query, keys, values and slots, to measure with.
    """
    if query.device.type != "cpu":
        return "sdpa"
    n = query.shape[2]
    if 1 < n < slots:
        return "grouped"  # SDPA would need the whole n x S mask
    kind = "decode" if n == 1 else "prefill"
    size = min(1 << max(slots - 1, 15).bit_length(), _LARGEST[kind])
    shape = f"{query.shape[1]}x{keys.shape[1]}x{query.shape[3]}"
    key = f"{kind} {str(query.dtype).removeprefix('torch.')} heads {shape} slots {size}"
    found = _decided.get(key) or _remembered().get(key)
    if found is None:
        found = _measure(query, keys, 1 if n == 1 else size, size, paths)
        _remember(key, found)
    _decided[key] = found
    return found


def _measure(
    query: Tensor,
    keys: Tensor,
    n: int,
    slots: int,
    paths: dict[Path_, Callable[[Tensor, Tensor, Tensor, int], object]],
) -> Path_:
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, length: int) -> Tensor:
        shape = (1, heads, length, query.shape[3])
        return torch.randn(shape, generator=generator).to(query.dtype)

    q, k, v = (
        drawn(query.shape[1], n),
        drawn(keys.shape[1], slots + 64),
        drawn(keys.shape[1], slots + 64),
    )
    best: dict[Path_, float] = {}
    for _ in range(4):  # in turn, so that both see the same machine
        for name, path in paths.items():
            start = time.perf_counter()
            path(q, k, v, slots)
            best[name] = min(best.get(name, float("inf")), time.perf_counter() - start)
    return min(best, key=lambda name: best[name])


def _file() -> Path:
    return cache_folder() / "attention.json"


@cache
def _machine() -> str:
    return f"{platform.machine()} {os.cpu_count()} cores, torch {torch.__version__}"


@cache
def _remembered() -> dict[str, Path_]:
    try:
        stored = json.loads(_file().read_text())[f"{_machine()}, {torch.get_num_threads()} threads"]
        return {key: path for key, path in stored.items() if path in get_args(Path_)}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}  # nothing is remembered yet, or what is cannot be read: measure again


def _remember(key: str, path: Path_) -> None:
    _remembered()[key] = path
    file = _file()
    section = f"{_machine()}, {torch.get_num_threads()} threads"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            stored = json.loads(file.read_text())
        except (OSError, ValueError):
            stored = {}
        if not isinstance(stored, dict):
            stored = {}
        stored[section] = {**stored.get(section, {}), **_remembered()}
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(stored, indent=1, sort_keys=True))
        temporary.replace(file)
    except OSError:
        pass  # a read-only home: the next process measures again
