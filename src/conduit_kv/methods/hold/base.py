"""The hold stage: decide once, when a prefill or turn ends, how each token is stored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.cache.codec import BITS
from conduit_kv.cache.packed import Quantised, Store
from conduit_kv.errors import PlanError
from conduit_kv.layout import Layout
from conduit_kv.methods.base import Method

FULL_BITS = 16
"""Stands for the model's own number type: such a token is left alone."""


@dataclass(frozen=True)
class Scene:
    """What a hold method may know of one sequence.

    Attributes
    ----------
    layout : Layout
        Of all its tokens.
    similarity : callable
        ``[W]`` fp32 in [-1, 1]: of each window, its cosine with the question; only for methods
        that search.
    apart : bool
        Whether it is one image alone, before it stands in any prompt.
    """

    layout: Layout
    similarity: Callable[[], Tensor]
    apart: bool = False


@dataclass(frozen=True)
class Where:
    """Which tokens of which layer are to be packed.

    Attributes
    ----------
    layer : int
    first, heads : int
        The first KV head, and how many the layer has.
    tokens : Tensor
        ``[S]`` int64 ascending.
    rotary : callable
        ``rotary(tokens)`` gives cosines and sines ``[S, d/2]`` fp32: a key's channels ``i`` and
        ``i + d/2`` were turned by that angle.
    """

    layer: int
    first: int
    heads: int
    tokens: Tensor
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class HoldMethod(Method):
    """Base of the hold methods.

    Tokens are looked at once, at the end of the prefill or turn that brought them, after the evict
    stage. Whatever comes later stays in full precision, and nothing is packed a second time.
    """

    stage: ClassVar[str] = "hold"
    in_decode: ClassVar[str] = "new tokens stay in full precision; nothing is packed again"
    searches: ClassVar[bool] = False
    """Whether bits depend on the question."""
    keys_by: ClassVar[str] = "channel"
    """Over what a quantised key's scales are shared: see :mod:`conduit_kv.cache.codec`."""

    @abstractmethod
    def bits_of(self, scene: Scene, tokens: Tensor) -> Tensor:
        """``[S]`` int64, the bits at which a layer holds ``tokens`` ``[S]`` int64.

        :data:`FULL_BITS` leaves a token alone. Text is left alone unless a method says otherwise.
        """

    @abstractmethod
    def store(self, keys: Tensor, values: Tensor, bits: int, where: Where) -> Store:
        """Pack K (RoPE applied) and V ``[P, S, d]`` of tokens that got the same bits."""

    def restore(
        self, state: dict[str, Tensor], bits: int, widths: tuple[int, int], where: Where
    ) -> Store:
        """What :meth:`store` made, from its ``state()``; ``widths`` are those of K and of V."""
        return Quantised(**state, widths=widths, bits=bits, keys_by=self.keys_by)

    def check_entries(self) -> None:
        """Raise PlanError unless images that were prefilled alone can be kept by this method."""
        if self.searches and not self.is_identity:
            raise PlanError(
                f"{self}: its bits depend on the question, and an image that is prefilled alone is "
                "packed before there is one: take for example kivi:4 or random-windows:3.17"
            )
        if getattr(self, "of", "visual") != "visual":
            raise PlanError(f"{self}: of an image that is prefilled alone no text is kept: leave "
                            "of= out")  # fmt: skip

    @property
    def guard(self) -> float:
        """Relative error of a layer's attention above which it keeps one level more; 0: never."""
        return 0.0

    def more(self, bits: Tensor) -> Tensor:
        """One level more than ``bits`` ``[S]``."""
        return torch.full_like(bits, FULL_BITS)


@dataclass(frozen=True)
class Quantiser(HoldMethod):
    """All tokens at the same bits.

    Parameters
    ----------
    bits : int
        Payload bits of a number: 2, 3, 4 or 8; 16 is the identity.
    of : {"visual", "prompt"}
        Which tokens are packed.
    """

    budget_field: ClassVar[str] = "bits"
    budget_hint: ClassVar[str] = "write {name}:4 for 4 bits"

    bits: int = FULL_BITS
    of: Literal["visual", "prompt"] = "visual"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (*BITS, FULL_BITS):
            known = ", ".join(map(str, BITS))
            raise PlanError(f"{self.name}: {self.bits} bits cannot be packed: take {known} or 16")

    @property
    def is_identity(self) -> bool:
        return self.bits == FULL_BITS

    def bits_of(self, scene: Scene, tokens: Tensor) -> Tensor:
        packed = torch.ones_like(tokens, dtype=torch.bool)
        if self.of == "visual":
            packed = scene.layout.visual[tokens]
        return torch.where(packed, self.bits, FULL_BITS)

    def store(self, keys: Tensor, values: Tensor, bits: int, where: Where) -> Store:
        return Quantised.of(keys, values, bits, self.keys_by)
