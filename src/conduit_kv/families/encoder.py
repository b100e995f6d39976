"""What an image encoder looked at: the attention of one of its layers, patch by patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_ROWS = 256
"""Rows of a patch-by-patch attention at a time."""


@dataclass(frozen=True)
class Looked:
    """How much the image encoder looked at each visual token.

    Attributes
    ----------
    scores : Tensor
        ``[N]`` fp32 on the CPU, one per visual token.
    by : str
        Whose attention it is, as the report names it.
    """

    scores: Tensor
    by: str


def has_class_token(tower: nn.Module) -> bool:
    """Whether an encoder's first token stands for no patch, but for the whole image."""
    names = (name.rpartition(".")[2] for name, _ in tower.named_parameters())
    return any(name in ("class_embedding", "cls_token") for name in names)


def looking_layer(model: PreTrainedModel, tower: nn.Module | None) -> nn.Module | None:
    """The attention module of the encoder layer whose states the language model gets.

    None if the encoder has no attention that names its projections ``q_proj`` and ``k_proj``.
    """
    if tower is None:
        return None
    found = [m for m in tower.modules() if hasattr(m, "q_proj") and hasattr(m, "k_proj")]
    chosen: Any = getattr(model.config, "vision_feature_layer", -1)
    if isinstance(chosen, list | tuple):
        chosen = chosen[-1]
    # Hidden state 0 is what enters the first layer: state n is what layer n - 1 gives.
    place = chosen if chosen < 0 else chosen - 1
    return found[place] if -len(found) <= place < len(found) else None


def without_class_token(model: PreTrainedModel, received: Tensor) -> Tensor:
    """``[B, P']``: without the first column, if the language model does not get it either."""
    config: Any = model.config
    return received[:, 1:] if config.vision_feature_select_strategy == "default" else received


@torch.inference_mode()
def received(module: nn.Module, hidden: Tensor, *, by_class_token: bool) -> Tensor:
    """``[B, P]`` fp32 on the CPU: head-mean attention that each of ``P`` encoder tokens receives.

    Parameters
    ----------
    module : Module
        As :func:`looking_layer` finds it.
    hidden : Tensor
        ``[B, P, D]``, what enters it.
    by_class_token : bool
        From the first token alone, instead of the mean over all.
    """
    attention: Any = module
    heads = int(attention.num_heads)

    def projected(name: str) -> Tensor:
        x: Tensor = getattr(attention, f"{name}_proj")(hidden)
        norm = getattr(attention, f"{name}_norm", nn.Identity())
        split: Tensor = norm(x).unflatten(-1, (heads, -1))
        return split.transpose(1, 2).float()

    queries, keys = projected("q"), projected("k")
    if by_class_token:
        queries = queries[:, :, :1]
    total: Tensor = torch.zeros(keys.shape[0], keys.shape[2], device=keys.device)
    for rows in queries.split(_ROWS, dim=2):
        weights = torch.matmul(rows, keys.transpose(2, 3)) * (keys.shape[3] ** -0.5)
        total += weights.softmax(-1).mean(1).sum(1)
    mean: Tensor = total / queries.shape[2]
    return mean.cpu()
