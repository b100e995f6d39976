"""How much of the cache is kept, and how that is shared over layers."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from conduit_kv.errors import PlanError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Budget:
    """What is KEPT: a share in (0, 1], a number of tokens, or bytes over all layers.

    In text a decimal is a share, an integer a number of tokens (``1`` is one token, ``1.0`` is
    everything) and a number with a unit is bytes.
    """

    value: float
    unit: Literal["share", "tokens", "bytes"] = "share"

    def __post_init__(self) -> None:
        if self.unit == "share" and not 0 < self.value <= 1:
            raise PlanError(
                f"budget {self.value:g} is not a share in (0, 1]: write 0.2 to keep 20 %, "
                "or an integer for a number of tokens"
            )
        if self.unit != "share" and self.value < 1:
            raise PlanError(f"budget {self.value:g} {self.unit} keeps nothing: ask for at least 1")

    @staticmethod
    def parse(text: str) -> Budget:
        """Read ``0.2``, ``128`` or ``64MB``."""
        found = re.fullmatch(
            r"([0-9]+(\.[0-9]*)?|\.[0-9]+)(e-?[0-9]+)?\s*([A-Za-z]*)", text.strip()
        )
        if found is None:
            raise PlanError(f"budget {text!r} is not a number: write 0.2, 128 or 64MB")
        number, unit = found[1] + (found[3] or ""), found[4].upper()
        if unit:
            if unit not in _UNITS:
                raise PlanError(f"budget {text!r}: unknown unit; known are {', '.join(_UNITS)}")
            return Budget(float(int(float(number) * _UNITS[unit])), "bytes")
        if "." in number or "e" in number:
            return Budget(float(number), "share")
        return Budget(float(number), "tokens")

    @staticmethod
    def of(value: Budget | float | int | str) -> Budget:
        """A budget from a number or text; a float is a share, an int a number of tokens."""
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            return Budget.parse(value)
        return Budget(float(value), "tokens" if isinstance(value, int) else "share")

    @property
    def is_everything(self) -> bool:
        """Whether the budget is the identity setting ``1.0``."""
        return self.unit == "share" and self.value == 1.0

    def total(self, lengths: Sequence[int], bytes_per_token: float) -> int:
        """Tokens kept in all layers together.

        Parameters
        ----------
        lengths : sequence of int
            Tokens that reached each layer.
        bytes_per_token : float
            Bytes of K and V of one token in one layer.
        """
        if self.unit == "share":
            return round(self.value * sum(lengths))
        if self.unit == "tokens":
            return sum(min(int(self.value), length) for length in lengths)
        return min(int(self.value // bytes_per_token), sum(lengths))

    def target(
        self, kept: int, then: int, now: int, layers: int = 1, bytes_per_token: float = 1.0
    ) -> int:
        """Tokens that a layer may hold in decoding: its part of what the budget allows by now.

        Parameters
        ----------
        kept, then : int
            What the layer was given, out of how many tokens, when the budget was last solved.
        now : int
            Tokens so far.
        layers, bytes_per_token
            Layers under the budget, and see :meth:`total`. A number of tokens or bytes that the
            prompt did not use up leaves room to grow.
        """
        if self.unit == "share":
            before, after = then, now
        else:
            before, after = (
                self.total([length] * layers, bytes_per_token) for length in (then, now)
            )
        return min(now, -(-kept * after // before) if before else kept)

    def __str__(self) -> str:
        if self.unit == "share":
            return repr(float(self.value))
        return f"{int(self.value)}" + ("B" if self.unit == "bytes" else "")


def largest_remainder(shares: Sequence[float], total: int) -> list[int]:
    """Round ``shares`` to integers that sum to ``total``; ties go to the lower index."""
    floors = [int(share + 1e-9) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (-(shares[i] - floors[i]), i))
    for i in order[: max(0, total - sum(floors))]:
        floors[i] += 1
    return floors


def share_out(
    total: int,
    weights: Sequence[float],
    most: Sequence[int],
    least: Sequence[int] | None = None,
) -> list[int]:
    """Share ``total`` over layers in proportion to ``weights``, between ``least`` and ``most``.

    Water-filling: what a full layer cannot take, and what a starved layer is short of, goes to and
    comes from the others in proportion to their weights, so that the sum is exactly ``total``. If
    the floors alone exceed ``total`` the floors win; if ``most`` sums to less, everything is kept.
    """
    layers = range(len(most))
    low = [min(most[i], least[i]) if least is not None else 0 for i in layers]
    if sum(low) >= total:
        return low
    if sum(most) <= total:
        return list(most)
    positive = [max(float(w), 0.0) for w in weights]
    # A layer without weight still takes what the others cannot hold.
    tiny = max(max(positive, default=0.0), 1.0) * 1e-12
    weight = [max(w, tiny) for w in positive]

    limits = list(zip(weight, low, most, strict=True))

    def filled(level: float) -> float:
        return sum(min(max(level * w, at_least), at_most) for w, at_least, at_most in limits)

    # What is filled grows piecewise linearly: find the piece, then the level within it.
    bends = sorted({limit / w for w, *both in limits for limit in both})
    piece = bisect.bisect_left(bends, float(total), key=filled)
    below, above = bends[piece - 1] if piece else 0.0, bends[piece]
    steps = filled(above) - filled(below)
    level = above - (above - below) * (filled(above) - total) / steps if steps else above
    exact = [min(max(level * weight[i], low[i]), most[i]) for i in layers]
    counts = largest_remainder(exact, total)
    # Rounding up may pass a layer's limit by one; give that token to the next layer with room.
    for i in layers:
        while counts[i] > most[i]:
            counts[i] -= 1
            j = next(j for j in layers if counts[j] < most[j])
            counts[j] += 1
    return counts
