"""PCA over the tokens on keys and values alike: KVCapsule's other control."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from conduit_kv.cache.capsule import Capsule, rotate
from conduit_kv.cache.packed import Store
from conduit_kv.methods.base import register
from conduit_kv.methods.hold.base import Where
from conduit_kv.methods.hold.kvcapsule import KvCapsule

if TYPE_CHECKING:
    from conduit_kv.cache.capsule import BlockParts
    from conduit_kv.capsule import Moments


@dataclass(frozen=True)
class Components(Capsule):
    """Keys too are coefficients over the tokens of a block, before RoPE."""

    @property
    def _turns(self) -> None:  # type: ignore[override]
        """Nothing takes the place of rebuilding."""

    def _keys(self, dtype: torch.dtype) -> Tensor:
        if self.rebuilt:
            return self.rebuilt[0]
        parts = self.parts
        free = (parts.mix @ self.keys.float() + parts.key_mean[:, None]).flatten(1, 2)
        found = rotate(free, self.cos, self.sin).to(dtype)
        if self.once:
            self.rebuilt.append(found)
        return found


@register
@dataclass(frozen=True)
class Pca(KvCapsule):
    r"""Keys before RoPE and values: :math:`C = U^\top (X - \mu)`, each with its own ``U``.

    The best rank-``r`` blocks by squared error, with the same numbers per layer as KVCapsule's. No
    key is exact.
    """

    name: ClassVar[str] = "pca"
    paper: ClassVar[str] = ""
    packs: ClassVar[type[Capsule]] = Components

    def fitted(self, moments: Moments) -> list[BlockParts]:
        return [
            replace(parts, mix=key_basis)
            for parts, (key_basis, _) in zip(
                moments.parts(self.keep), moments.key_bases(self.keep), strict=True
            )
        ]

    def store(self, keys: Tensor, values: Tensor, bits: int, where: Where) -> Store:
        whole = super().store(keys, values, bits, where)
        if not isinstance(whole, Capsule):
            raise TypeError("a block method packs into a capsule")
        parts = whole.parts
        scale = (whole.cos[0, 0].square() + whole.sin[0, 0].square()).item()
        free = rotate(keys.float(), whole.cos, -whole.sin) / scale
        blocks = free.unflatten(1, (-1, parts.block)) - parts.key_mean[:, None]
        coefficients = (parts.mix.T @ blocks).to(keys.dtype)
        return self.packs(
            coefficients, whole.values, whole.cos, whole.sin, parts, self.rebuild == "once"
        )
