"""What was learned of a model's visual keys and values, and what follows from it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conduit_kv.artefact import Artefact
from conduit_kv.cache.capsule import BlockParts
from conduit_kv.errors import InputError

KIND = "kvcapsule"
_NAMES = ("key_mean", "key_covariance", "value_mean", "value_covariance")


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of a model's visual keys and values within blocks, per layer.

    All that depends on how much is kept follows from them in closed form (:meth:`parts`), so that
    one artefact serves every share.

    Attributes
    ----------
    key_mean, value_mean : Tensor
        ``[L, G, g, d]`` fp32, ``g`` tokens in a block; keys before RoPE.
    key_covariance, value_covariance : Tensor
        ``[L, g, g]`` fp32 over the tokens of a block, summed over heads and channels; a key's
        channels weigh as much as queries make of them.
    """

    key_mean: Tensor
    key_covariance: Tensor
    value_mean: Tensor
    value_covariance: Tensor

    @staticmethod
    def of(artefact: Artefact) -> Moments:
        """Those in a file.

        Raises
        ------
        InputError
            If it is another method's.
        """
        if artefact.kind != KIND:
            raise InputError(f"this artefact is for {artefact.kind}, not for {KIND}")
        return Moments(*(artefact.tensors[name] for name in _NAMES))

    def artefact(self, model: str, config: Mapping[str, Any]) -> Artefact:
        """For a file: of a model with these weights, fitted in this way."""
        tensors = {name: getattr(self, name) for name in _NAMES}
        return Artefact(KIND, model, self.layers, config, tensors)

    @property
    def block(self) -> int:
        """``g``."""
        return int(self.key_mean.shape[2])

    @property
    def layers(self) -> int:
        """``L``."""
        return int(self.key_mean.shape[0])

    def counts(self, keep: float) -> list[tuple[int, int]]:
        """Per layer, how many keys and how many coefficients of values are kept of a block.

        One budget, ``keep`` of all numbers, is spent where it lowers the relative error most; every
        layer has at least one of each.
        """
        key_gain = [_gains(_removal(covariance)[1]) for covariance in self.key_covariance]
        value_gain = [_gains(_tails(covariance)) for covariance in self.value_covariance]
        counts = [[1, 1] for _ in range(self.layers)]
        room = int(keep * 2 * self.block * self.layers + 1e-9) - 2 * self.layers
        gains = [key_gain, value_gain]
        while room > 0:
            best, where = -1.0, None
            for layer, pair in enumerate(counts):
                for kind in (0, 1):
                    if pair[kind] < self.block and gains[kind][layer][pair[kind]] > best:
                        best, where = gains[kind][layer][pair[kind]], (layer, kind)
            if where is None:
                break
            counts[where[0]][where[1]] += 1
            room -= 1
        return [(keys, values) for keys, values in counts]

    def parts(self, keep: float) -> list[BlockParts]:
        """Per layer, what packs and reads its blocks when ``keep`` of all numbers is kept."""
        return [
            self._layer(layer, keys, values)
            for layer, (keys, values) in enumerate(self.counts(keep))
        ]

    def _layer(self, layer: int, keys: int, values: int) -> BlockParts:
        covariance = self.key_covariance[layer].double()
        order, _ = _removal(self.key_covariance[layer])
        kept = torch.tensor(sorted(order[:keys]))
        missing = torch.tensor([t for t in range(self.block) if t not in set(kept.tolist())])
        mix = _regression(covariance, kept, missing.long())
        basis = _basis(self.value_covariance[layer], values)
        return BlockParts(
            kept, mix, self.key_mean[layer], self.value_mean[layer], basis, basis.T.contiguous()
        )

    def key_bases(self, keep: float) -> list[tuple[Tensor, Tensor]]:
        """Per layer, bases over the tokens ``[g, r]`` of keys and of values, of the same sizes."""
        return [
            (_basis(k, keys), _basis(v, values))
            for k, v, (keys, values) in zip(
                self.key_covariance, self.value_covariance, self.counts(keep), strict=True
            )
        ]


def _regression(covariance: Tensor, kept: Tensor, missing: Tensor) -> Tensor:
    """``[g - m, m]`` fp32: the best linear prediction of some tokens from others."""
    inner = covariance[kept][:, kept]
    ridge = 1e-4 * covariance.diagonal().mean() * torch.eye(len(kept), dtype=torch.float64)
    mix: Tensor = torch.linalg.solve(inner + ridge, covariance[kept][:, missing]).T
    return mix.float().contiguous()


def _removal(covariance: Tensor) -> tuple[list[int], list[float]]:
    """Tokens in the order in which keeping them explains most, and the error after each.

    Greedy: after each choice the others are left with what the chosen ones cannot predict.
    """
    rest = covariance.double().clone()
    total = max(float(rest.diagonal().sum()), 1e-30)
    order: list[int] = []
    errors = [1.0]
    floor = 1e-9 * total
    for _ in range(len(rest)):
        spread = rest.diagonal().clamp_min(0)
        gain = rest.square().sum(0) / spread.clamp_min(floor)
        gain[order] = -1.0
        token = int(gain.argmax())
        order.append(token)
        if float(spread[token]) > floor:
            rest -= rest[:, token : token + 1] @ rest[token : token + 1] / rest[token, token]
        errors.append(max(float(rest.diagonal().sum()), 0.0) / total)
    return order, errors


def _tails(covariance: Tensor) -> list[float]:
    """What a basis of 0, 1, 2, ... vectors leaves of the variance."""
    values = torch.linalg.eigvalsh(covariance.double()).flip(0).clamp_min(0)
    total = values.sum().clamp_min(1e-30)
    left = 1 - torch.cat([torch.zeros(1, dtype=torch.float64), values.cumsum(0)]) / total
    return left.clamp_min(0).tolist()  # type: ignore[no-any-return]


def _gains(errors: list[float]) -> list[float]:
    """What one more than ``n`` lowers the error by, for each ``n``."""
    return [before - after for before, after in itertools.pairwise(errors)]


def _basis(covariance: Tensor, size: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(covariance.double()).eigenvectors.flip(1)
    return vectors[:, :size].float().contiguous()
