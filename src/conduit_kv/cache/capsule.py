r"""Blocks of visual tokens of which some keys are kept, and of values a few coefficients.

A block is ``g`` consecutive visual tokens. Its keys are rebuilt from those kept, before RoPE,

.. math:: \hat K = \mu^K + M\,(K_{kept} - \mu^K_{kept})

and turned to their positions; the kept ones are exact. Where the tokens of every block are turned
against each other alike (a row of a grid, RoPE), a step's query is turned instead of the keys, and
no key is rebuilt: with :math:`R_{ts}` the turn from token ``t`` of a block to ``s``,

.. math:: q \cdot \hat K_t = \sum_s M_{ts}\,(R_{ts}\, q) \cdot K_s + q \cdot R_t\,\mu'_t,
          \qquad \mu'_t = \mu_t - \sum_s M_{ts}\, \mu_s

which is three matrix products over what is held. Its values are coefficients of a basis over
the tokens, :math:`C = U^\top (V - \mu^V)`, and are attended without being rebuilt:

.. math:: a^\top V \approx (a^\top U)\, C + a^\top \mu^V
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from conduit_kv.cache.packed import Store


@dataclass(frozen=True)
class BlockParts:
    """What one layer's blocks have in common; fitted, or given by a rule.

    Attributes
    ----------
    kept : Tensor
        ``[m]`` int64 ascending, places in a block whose keys are kept.
    mix : Tensor
        ``[g - m, m]``, how the other keys follow from them.
    key_mean, value_mean : Tensor
        ``[G, g, d]``.
    basis : Tensor
        ``[g, r]``, of values; its columns need not be orthonormal.
    project : Tensor
        ``[r, g]``, values to coefficients; the transpose of an orthonormal basis.
    """

    kept: Tensor
    mix: Tensor
    key_mean: Tensor
    value_mean: Tensor
    basis: Tensor
    project: Tensor

    @property
    def block(self) -> int:
        """``g``."""
        return int(self.basis.shape[0])

    @property
    def missing(self) -> Tensor:
        """``[g - m]`` int64 ascending, the places that are not kept."""
        left = torch.ones(self.block, dtype=torch.bool, device=self.kept.device)
        left[self.kept] = False
        return torch.nonzero(left).flatten()

    @property
    def share(self) -> float:
        """Share of the numbers of K and V that is kept."""
        return (len(self.kept) + self.basis.shape[1]) / (2 * self.block)

    def heads(self, first: int, count: int) -> BlockParts:
        """Those of some of the KV heads."""
        mine = slice(first, first + count)
        return replace(self, key_mean=self.key_mean[mine], value_mean=self.value_mean[mine])

    def to(self, device: torch.device) -> BlockParts:
        """On another device."""
        return BlockParts(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def bytes(self) -> int:
        """Bytes of all of it."""
        tensors = (getattr(self, name) for name in self.__dataclass_fields__)
        return sum(t.numel() * t.element_size() for t in tensors)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``[..., S, d]`` by angles ``[S, d/2]``: channel ``i`` with ``i + d/2``."""
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


@dataclass(frozen=True)
class Capsule(Store):
    """K and V of whole blocks.

    Attributes
    ----------
    keys : Tensor
        ``[P, B, m, d]``, RoPE applied.
    values : Tensor
        ``[P, B, r, d]``, coefficients.
    cos, sin : Tensor
        ``[B g, d/2]`` fp32 of every slot; shared by all layers.
    parts : BlockParts
        Process memory, not the request's: shared by all requests.
    once : bool
        Whether rebuilt keys stay, which takes the room of all keys and saves the rebuilding.
    """

    keys: Tensor
    values: Tensor
    cos: Tensor
    sin: Tensor
    parts: BlockParts
    once: bool = False
    rebuilt: list[Tensor] = field(default_factory=list)
    holes_known: list[Any] = field(default_factory=list, repr=False)

    @staticmethod
    def of(
        keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, parts: BlockParts, once: bool
    ) -> Capsule:
        """Pack K (RoPE applied) and V ``[P, B g, d]``."""
        pairs, slots, width = keys.shape
        blocks = slots // parts.block
        kept = keys.view(pairs, blocks, parts.block, width)[:, :, parts.kept].contiguous()
        v = values.view(pairs, blocks, parts.block, -1).float() - parts.value_mean[:, None]
        coefficients = torch.matmul(parts.project, v).to(values.dtype)
        return Capsule(kept, coefficients, cos, sin, parts, once)

    @property
    def unit(self) -> int:  # type: ignore[override]
        return self.parts.block

    @property
    def bits(self) -> float:  # type: ignore[override]
        return 16 * self.parts.share

    @property
    def widths(self) -> tuple[int, int]:  # type: ignore[override]
        return self.keys.shape[3], self.values.shape[3]

    def _keys(self, dtype: torch.dtype) -> Tensor:
        """``[P, B g, d]``: the kept keys and the others rebuilt."""
        if self.rebuilt:
            return self.rebuilt[0]
        parts = self.parts
        pairs, blocks, _, width = self.keys.shape
        cos, sin = (x.view(blocks, parts.block, -1) for x in (self.cos, self.sin))
        scale = (cos[:1, :1, :1].square() + sin[:1, :1, :1].square()).reshape(())
        free = rotate(self.keys.float(), cos[:, parts.kept], -sin[:, parts.kept]) / scale
        apart = free - parts.key_mean[:, None, parts.kept]
        missing = parts.missing
        others = torch.matmul(parts.mix, apart) + parts.key_mean[:, None, missing]
        whole = self.keys.new_empty((pairs, blocks, parts.block, width), dtype=dtype)
        whole[:, :, parts.kept] = self.keys.to(dtype)
        whole[:, :, missing] = rotate(others, cos[:, missing], sin[:, missing]).to(dtype)
        found = whole.flatten(1, 2)
        if self.once:
            self.rebuilt.append(found)
        return found

    def dense(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        v = torch.matmul(self.parts.basis, self.values.float()) + self.parts.value_mean[:, None]
        return self._keys(dtype), v.flatten(1, 2).to(dtype)

    def state(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values}  # angles follow from the tokens

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "keys", self.keys
        yield "values", self.values
        yield "rotary", self.cos
        yield "rotary", self.sin
        for tensor in self.rebuilt:
            yield "keys", tensor
        turns = self.__dict__.get("_turns")
        if turns is not None:
            for tensor in (turns.mix_cos, turns.mix_sin, turns.mean, turns.first):
                yield "rotary", tensor

    def units(self, kept: Tensor) -> Capsule:
        kept = kept.to(self.keys.device)
        cos, sin = (
            x.view(-1, self.unit, x.shape[1])[kept].flatten(0, 1) for x in (self.cos, self.sin)
        )
        keys, values = self.keys[:, kept], self.values[:, kept]
        return replace(self, keys=keys, values=values, cos=cos, sin=sin, rebuilt=[])

    def head(self, number: int) -> Capsule:
        mine = slice(number, number + 1)
        return replace(
            self,
            keys=self.keys[mine].clone(),
            values=self.values[mine].clone(),
            parts=self.parts.heads(number, 1),
            rebuilt=[],
        )

    @cached_property
    def _turns(self) -> _Turns | None:
        return None if self.once else _turns_of(self.parts, self.cos, self.sin)

    def _logits(self, rows: Tensor) -> Tensor:
        """``[P, B, r, g]`` fp32 of scaled query rows ``[P, r, d]``."""
        pairs, blocks, count, width = self.keys.shape
        size = rows.shape[1]
        turns = self._turns if size <= _FEW_ROWS else None
        if turns is None:
            found = torch.bmm(rows, self._keys(rows.dtype).transpose(1, 2)).float()
            return found.view(pairs, size, blocks, self.unit).transpose(1, 2)
        plain = rows.float()
        one, two = plain.chunk(2, dim=-1)
        crossed = torch.cat([two, -one], dim=-1)
        # [P, r, g, m, d]: the query as each kept key of a block must see it, for each token.
        seen = plain[:, :, None, None] * turns.mix_cos
        seen = seen.addcmul_(crossed[:, :, None, None], turns.mix_sin).to(self.keys.dtype)
        others = torch.bmm(
            self.keys.view(pairs, blocks, count * width),
            seen.view(pairs, size * self.unit, count * width).transpose(1, 2),
        )
        # The constant part of a token, turned on by its block's first angle.
        halves = turns.mean.chunk(2, dim=-1)  # [P, g, d/2] each
        same = one[:, :, None] * halves[0][:, None] + two[:, :, None] * halves[1][:, None]
        across = two[:, :, None] * halves[0][:, None] - one[:, :, None] * halves[1][:, None]
        constant = torch.cat([same, across], dim=-1).flatten(1, 2)
        found = torch.matmul(turns.first, constant.transpose(1, 2)).add_(others)
        return found.view(pairs, blocks, size, self.unit)

    def attend(self, query: Tensor, scaling: float, index: Tensor) -> tuple[Tensor, Tensor]:
        pairs, blocks, _, width = self.keys.shape
        _, heads, n, _ = query.shape
        parts = self.parts
        rows = query[0].reshape(pairs, heads // pairs * n, width)
        logits = self._logits(rows * scaling)
        if not self._whole(index):
            holes = (index < 0).view(-1, blocks, 1, parts.block)
            logits = logits.masked_fill(holes, float("-inf"))
        highest = logits.amax(3).amax(1)
        weights = (logits - highest[:, None, :, None]).exp_()
        by_place = weights.sum(1)
        total = by_place.sum(-1)
        lse = total.log() + highest
        mixed = torch.matmul(weights.to(self.values.dtype), parts.basis.to(self.values.dtype))
        output = torch.bmm(mixed.transpose(1, 2).flatten(2), self.values.flatten(1, 2)).float()
        output += torch.bmm(by_place, parts.value_mean)
        output /= total[..., None]
        shape = (1, heads, n)
        return output.view(*shape, -1).to(query.dtype), lse.view(shape)

    def _whole(self, index: Tensor) -> bool:
        """Whether no slot is a hole; looked at once per index."""
        known = self.holes_known
        if not known or known[0] is not index:
            known[:] = [index, bool((index >= 0).all())]
        return bool(known[1])


_TURN = 0.02
_FEW_ROWS = 16
"""Query rows up to which turning queries costs less than rebuilding keys."""


@dataclass(frozen=True)
class _Turns:
    """What turning a query instead of the keys takes; the same for all blocks but ``first``.

    Attributes
    ----------
    mix_cos, mix_sin : Tensor
        ``[g, m, d]``: ``M`` times cosine and sine of the angle between a token and a kept one; a
        kept token follows from itself alone.
    mean : Tensor
        ``[P, g, d]``: the constant part, turned to the token's angle from its block's first.
    first : Tensor
        ``[B, d]``: cosine and sine of each block's first angle.
    """

    mix_cos: Tensor
    mix_sin: Tensor
    mean: Tensor
    first: Tensor


def _turns_of(parts: BlockParts, cos: Tensor, sin: Tensor) -> _Turns | None:
    """None where blocks differ in how their tokens are turned against each other."""
    g = parts.block
    cos, sin = (x.view(-1, g, x.shape[1]) for x in (cos, sin))
    scale = cos[:1, :1].square() + sin[:1, :1].square()
    if not torch.allclose(scale, torch.ones_like(scale), atol=1e-4):
        return None  # scaled cosines: rebuild
    # The angle of each token from its block's first.
    near = cos * cos[:, :1] + sin * sin[:, :1]
    far = sin * cos[:, :1] - cos * sin[:, :1]
    # Cosines of large positions are known to a few thousandths; another position is a radian off.
    if not (
        torch.allclose(near, near[:1].expand_as(near), atol=_TURN)
        and torch.allclose(far, far[:1].expand_as(far), atol=_TURN)
    ):
        return None
    near, far = near[0], far[0]  # [g, d/2]
    kept = parts.kept
    mix = torch.zeros((g, len(kept)), device=parts.mix.device)
    mix[kept] = torch.eye(len(kept), device=mix.device)
    mix[parts.missing] = parts.mix
    # Token t from kept token s.
    between_cos = near[:, None] * near[kept] + far[:, None] * far[kept]
    between_sin = far[:, None] * near[kept] - near[:, None] * far[kept]
    constant = parts.key_mean - mix @ parts.key_mean[:, kept]
    return _Turns(
        (mix[..., None] * between_cos).repeat(1, 1, 2),
        (mix[..., None] * between_sin).repeat(1, 1, 2),
        rotate(constant, near, far),
        torch.cat([cos[:, 0], sin[:, 0]], dim=-1),
    )
