"""What is stored of an image, or of a block of text: all that a later prompt needs of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conduit_kv.layout import Grid

VERSION = 1
"""Of the entry's contents; a file of another version is a miss."""


@dataclass(frozen=True)
class Entry:
    """An image as the language model saw it when it was prefilled alone.

    Or a block of the text that a prompt begins with, as any prompt sees it that begins so: it is
    never computed again, and so has neither features (D = 0) nor a grid.

    Attributes
    ----------
    digest : str
        SHA-256 of its :class:`conduit_kv.reuse.keys.Key`, in hexadecimal.
    keys : Tensor
        ``[L, G, N, d]``, before RoPE and after the keys' norm: position-free.
    values : Tensor
        ``[L, G, N, d]``.
    features : Tensor
        ``[N, D]``, the encoder's output as merged into the input embeddings.
    deepstack : Tensor
        ``[S, N, D]``, what is added to the hidden states after the first ``S`` layers; S = 0 for
        models without DeepStack.
    positions : Tensor
        ``[axes, N]`` int64, the positions that its tokens had.
    grid : Grid or None
    seconds : float
        What it took to compute.
    """

    digest: str
    keys: Tensor
    values: Tensor
    features: Tensor
    deepstack: Tensor
    positions: Tensor
    grid: Grid | None
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """``N``."""
        return int(self.features.shape[0])

    @property
    def layers(self) -> int:
        """``L``."""
        return int(self.keys.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def to(self, device: torch.device) -> Entry:
        """The same entry on a device."""
        if self.keys.device == device:
            return self
        moved: dict[str, Any] = {name: x.to(device) for name, x in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name."""
        return {
            "keys": self.keys,
            "values": self.values,
            "features": self.features,
            "deepstack": self.deepstack,
            "positions": self.positions,
        }
