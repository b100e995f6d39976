"""The one order in which scores are taken."""

from __future__ import annotations

import torch
from torch import Tensor


def highest(score: Tensor, count: int) -> Tensor:
    """``[count]`` int64 on the CPU: places of the highest scores ``[n]``, the best one first.

    Ties go to the lower index.
    """
    return torch.sort(score.float().cpu(), descending=True, stable=True).indices[:count]
