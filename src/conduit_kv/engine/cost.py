"""What a prefill and a decoding step cost: FLOPs of the decoder layers.

Per layer, with ``m`` tokens that run and ``o`` older ones held, hidden size ``D``, ``H`` query and
``G`` KV heads of ``d``, and an MLP of width ``I`` with ``k`` matrices (3 where it is gated):

- attention: ``m (2 D (H + 2 G) d + 2 H d D)`` for the projections, and
  ``4 H d (m o + m (m + 1) / 2)`` for logits and values, a token seeing itself and what came before;
- MLP: ``2 m k D I``;
- ranking, where a layer is asked for queries and keys of ``m`` tokens before it runs:
  ``2 m D (H + 2 G) d``, and ``2 H d m`` for the newest row.

A multiplication and an addition count as two. Embeddings, norms and the language head do not count:
they are the same under every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from conduit_kv.engine.request import RequestCache
    from conduit_kv.families import Family


@dataclass(frozen=True)
class Flops:
    """FLOPs by part.

    Attributes
    ----------
    attention, mlp : float
    ranking : float
        What a plan adds to decide which tokens run.
    """

    attention: float = 0.0
    mlp: float = 0.0
    ranking: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + self.mlp + self.ranking

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.attention + other.attention, self.mlp + other.mlp, self.ranking + other.ranking
        )


@dataclass(frozen=True)
class Cost:
    """Shape of a model's decoder layers, as far as FLOPs go.

    Attributes
    ----------
    hidden, heads, kv_heads, head_dim, mlp : int
    matrices : int
        Of the MLP.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    matrices: int = 3

    @staticmethod
    def of(family: Family, text_model: nn.Module) -> Cost:
        """Read a text model."""
        config: Any = text_model.config
        heads = int(config.num_attention_heads)
        layer = family.layers(text_model)[0]
        return Cost(
            hidden=int(config.hidden_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            mlp=int(config.intermediate_size),
            matrices=3 if hasattr(getattr(layer, "mlp", None), "gate_proj") else 2,
        )

    def layer(self, rows: float, pairs: float) -> Flops:
        """One layer over ``rows`` tokens that see ``pairs`` keys in all."""
        into = 2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        out = 2 * self.heads * self.head_dim * self.hidden
        return Flops(
            rows * (into + out) + 4 * self.heads * self.head_dim * pairs,
            2.0 * rows * self.matrices * self.hidden * self.mlp,
        )

    def prefill(self, tokens: Sequence[int], older: int = 0) -> Flops:
        """Tokens that run, layer by layer, each layer holding ``older`` ones before."""
        parts = (self.layer(m, m * older + m * (m + 1) / 2) for m in tokens)
        return sum(parts, Flops())

    def ranking(self, rows: float) -> Flops:
        """One layer asked for queries and keys of ``rows`` tokens."""
        into = 2 * self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        return Flops(ranking=rows * (into + 2 * self.heads * self.head_dim))


@dataclass(frozen=True)
class Work:
    """FLOPs of a request, and what they would be without a plan.

    Attributes
    ----------
    prefill, full_prefill : Flops
        Of the newest prefill or turn, over the whole batch, padding included.
    step, full_step : Flops
        Of the next decoded token.
    """

    prefill: Flops
    full_prefill: Flops
    step: Flops
    full_step: Flops

    @staticmethod
    def of(cache: RequestCache, cost: Cost) -> Work:
        """What a cache's layers have run."""
        batch, progress = cache.progress.batch, cache.progress
        layers = list(cache)
        new, before = progress.turn_columns, progress.turn_start
        ran = [cost.layer(*layer.work) for layer in layers]
        asked = [cost.ranking(rows) for flow in cache.flows for _, rows in flow.ranked]
        whole = batch * new, batch * (new * before + new * (new + 1) / 2)
        full = [cost.layer(*whole)] * len(layers)
        step = [cost.layer(batch, batch * (layer.slots + 1)) for layer in layers]
        full_step = [cost.layer(batch, batch * (progress.seen + 1))] * len(layers)
        return Work(*(sum(parts, Flops()) for parts in (ran + asked, full, step, full_step)))
