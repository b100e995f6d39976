"""Stride and interpolate: KVCapsule's control without anything learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.cache.capsule import BlockParts
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.hold.base import Where
from conduit_kv.methods.hold.kvcapsule import Blocks


@register
@dataclass(frozen=True)
class StrideInterpolate(Blocks):
    """Of each block keep tokens at a uniform stride; those between are interpolated.

    Keys are interpolated before RoPE, which a mean of turned keys would mix up.

    Parameters
    ----------
    block : int
        Tokens in a block.
    """

    name: ClassVar[str] = "stride-interpolate"

    block: int = 14

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block < 1 or int(self.keep * self.block + 1e-9) < 1:
            raise PlanError(
                f"{self.name}: keep={self.keep:g} of {self.block} tokens is not one token: take "
                "larger blocks, or keep more"
            )

    @property
    def block_size(self) -> int:
        return self.block

    def parts(self, where: Where, keys: Tensor) -> BlockParts:
        size, heads, width = self.block, where.heads, keys.shape[2]
        count = int(self.keep * size + 1e-9)
        places = torch.linspace(0, size - 1, count) if count > 1 else torch.tensor([size // 2])
        kept = places.round().long().unique()
        weights = interpolation(kept, size)
        others = torch.tensor([t for t in range(size) if t not in set(kept.tolist())]).long()
        zero = torch.zeros(heads, size, width)
        project = torch.zeros(len(kept), size)
        project[torch.arange(len(kept)), kept] = 1.0
        return BlockParts(kept, weights[others], zero, zero, weights, project)


def interpolation(kept: Tensor, size: int) -> Tensor:
    """``[g, m]``: each token as a mean of the kept ones beside it."""
    weights = torch.zeros(size, len(kept))
    for token in range(size):
        after = int(torch.searchsorted(kept, token))
        if after == len(kept):
            weights[token, -1] = 1.0
        elif int(kept[after]) == token or after == 0:
            weights[token, after] = 1.0
        else:
            left, right = int(kept[after - 1]), int(kept[after])
            weights[token, after] = (token - left) / (right - left)
            weights[token, after - 1] = 1 - weights[token, after]
    return weights
