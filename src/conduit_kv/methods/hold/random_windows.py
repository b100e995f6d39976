"""Random windows: WindowQuant's control."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from conduit_kv.layout import Layout
from conduit_kv.methods.base import register
from conduit_kv.methods.hold.base import Scene
from conduit_kv.methods.hold.windowquant import WindowQuant


@register
@dataclass(frozen=True)
class RandomWindows(WindowQuant):
    """WindowQuant with windows ranked by chance: the same bits, in other places.

    Parameters
    ----------
    seed : int
        Of the ranking, which is the same in all layers, as WindowQuant's is.
    """

    name: ClassVar[str] = "random-windows"
    paper: ClassVar[str] = ""
    searches: ClassVar[bool] = False

    seed: int = 0

    def bits_of(self, scene: Scene, tokens: Tensor) -> Tensor:
        chance = Scene(scene.layout, lambda: self._chance(scene.layout))
        return super().bits_of(chance, tokens)

    def _chance(self, layout: Layout) -> Tensor:
        windows = int(self.windows(layout).max()) + 1
        # The length tells prompts apart, so that no window is favoured over a whole task.
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + len(layout))
        return torch.rand(windows, generator=random)
