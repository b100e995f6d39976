"""FP8: keys and values as 8-bit floating-point numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.cache.packed import Narrow, Store
from conduit_kv.methods.base import register
from conduit_kv.methods.hold.base import FULL_BITS, HoldMethod, Scene, Where


@register
@dataclass(frozen=True)
class Fp8(HoldMethod):
    """Round to ``float8_e4m3fn`` without scales, as servers do; beyond 448 its largest number.

    Parameters
    ----------
    of : {"visual", "prompt"}
        Which tokens are packed.
    """

    name: ClassVar[str] = "fp8"

    of: Literal["visual", "prompt"] = "visual"

    def bits_of(self, scene: Scene, tokens: Tensor) -> Tensor:
        packed = scene.layout.visual[tokens] if self.of == "visual" else tokens >= 0
        return torch.where(packed, 8, FULL_BITS)

    def store(self, keys: Tensor, values: Tensor, bits: int, where: Where) -> Store:
        return Narrow.of(keys, values)

    def restore(
        self, state: dict[str, Tensor], bits: int, widths: tuple[int, int], where: Where
    ) -> Store:
        return Narrow(state["keys"], state["values"])
