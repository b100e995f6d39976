"""RTN: uniform round-to-nearest, the plainest quantised cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from conduit_kv.methods.base import register
from conduit_kv.methods.hold.base import Quantiser


@register
@dataclass(frozen=True)
class Rtn(Quantiser):
    """Round every number to the nearest of ``2^bits`` levels; K and V token by token.

    Asymmetric, 32 channels of a token share a scale and a zero. A control: that K has outlier
    channels, which make its other channels coarse here, is what KIVI answers.
    """

    name: ClassVar[str] = "rtn"
    keys_by: ClassVar[str] = "token"
