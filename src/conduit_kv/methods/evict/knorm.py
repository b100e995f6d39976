"""KNorm: keys of small norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from conduit_kv.methods.base import register
from conduit_kv.methods.evict.base import EvictMethod, Scores
from conduit_kv.view import LayerView


@register
@dataclass(frozen=True)
class KNorm(EvictMethod):
    r"""Keep the keys of smallest norm (arXiv 2406.11430): known.

    .. math:: s^g_j = - \lVert k^g_j \rVert_2

    for each KV head :math:`g` by itself. RoPE leaves a norm as it is. No attention is needed, and
    no token is protected. The paper's variant that spares the first two layers is not done, as in
    kvpress.

    Nothing is evicted in decoding, as in kvpress; the paper goes on.
    """

    name: ClassVar[str] = "knorm"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.11430"

    def score(self, view: LayerView) -> Scores:
        return Scores(-view.keys.float().norm(dim=-1).cpu())
