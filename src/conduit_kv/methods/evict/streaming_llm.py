"""StreamingLLM: attention sinks and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.select import PROTECTED, at_least
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class StreamingLlm(EvictMethod):
    """Keep the first tokens and the newest (arXiv 2309.17453): known.

    The first ``sinks`` tokens of the sequence always stay; of the others the newest stay. Text and
    visual tokens are alike. A token keeps its own position, as in kvpress; the paper counts
    positions inside the cache instead.

    In decoding the window slides on: the oldest token that is not a sink goes.

    Parameters
    ----------
    sinks : int
    decode : {"share", "off"}
        ``"off"`` evicts nothing in decoding.
    """

    name: ClassVar[str] = "streaming-llm"
    paper: ClassVar[str] = "https://arxiv.org/abs/2309.17453"
    in_decode: ClassVar[str] = "the window slides: the oldest token that is no sink goes"

    sinks: int = 4
    decode: Literal["share", "off"] = "share"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 0:
            raise PlanError(f"{self.name}: sinks={self.sinks} is negative")

    def score(self, view: LayerView) -> Scores:
        level = torch.zeros(view.size, dtype=torch.int8)
        return Scores(view.index.float(), at_least(level, view.index < self.sinks, PROTECTED))

    @property
    def scores_steps(self) -> bool:
        # Over its visual tokens alone a layer never grows.
        return self.decode != "off" and self.of == "prompt"

    def score_step(self, view: LayerView) -> Scores:
        return self.score(view)
