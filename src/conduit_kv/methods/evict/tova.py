"""TOVA: what the newest token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.methods.evict.parts import newest
from conduit_kv.methods.evict.select import PROTECTED
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class Tova(EvictMethod):
    r"""Token omission via attention (arXiv 2401.06104): known.

    With :math:`n` the newest token and :math:`H` query heads,

    .. math:: s_j = \frac{1}{H} \sum_h A^h_{nj}

    and all KV heads keep the same tokens. The newest token always stays, as in kvpress. Text and
    visual tokens are alike.

    In decoding each new token ranks all others in the same way, and the lowest go.

    Parameters
    ----------
    decode : {"share", "off"}
        ``"off"`` evicts nothing in decoding.
    """

    name: ClassVar[str] = "tova"
    paper: ClassVar[str] = "https://arxiv.org/abs/2401.06104"
    in_decode: ClassVar[str] = "the token that the newest one attends to least goes"

    decode: Literal["share", "off"] = "share"

    def score(self, view: LayerView) -> Scores:
        attention = view.newest_attention().mean(0).cpu()
        return Scores(attention, newest(torch.zeros(view.size, dtype=torch.int8), 1, PROTECTED))

    @property
    def scores_steps(self) -> bool:
        # Over its visual tokens alone a layer never grows.
        return self.decode != "off" and self.of == "prompt"

    def score_step(self, view: LayerView) -> Scores:
        return self.score(view)
