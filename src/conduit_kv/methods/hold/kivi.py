"""KIVI: keys per channel, values per token, the newest tokens in full precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.hold.base import FULL_BITS, Quantiser, Scene


@register
@dataclass(frozen=True)
class Kivi(Quantiser):
    """Keys per channel over 32 tokens, values per token over 32 channels, asymmetric.

    The ``residual`` newest tokens of the sequence stay in full precision. The paper packs them
    group by group while decoding goes on; here what is decoded stays in full precision, as with
    every other method, so that all of them hold the same tokens packed.

    Parameters
    ----------
    residual : int
        Tokens at the end of the prompt that are left alone, text included.
    """

    name: ClassVar[str] = "kivi"
    paper: ClassVar[str] = "https://arxiv.org/abs/2402.02750"

    residual: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual < 0:
            raise PlanError(f"kivi: residual={self.residual} is not a number of tokens")

    def bits_of(self, scene: Scene, tokens: Tensor) -> Tensor:
        bits = super().bits_of(scene, tokens)
        if scene.apart:  # it has no newest tokens: a prompt goes on behind it
            return bits
        newest = tokens >= len(scene.layout) - self.residual
        return torch.where(newest, FULL_BITS, bits)
