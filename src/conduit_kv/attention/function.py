"""The attention function that Conduit registers with Transformers.

While Conduit runs a text stack, the stack's attention modules are told to use this function. The
request's state comes in the ``conduit`` argument, never from the module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

if TYPE_CHECKING:
    from conduit_kv.cache import VisualCache

ATTENTION = "conduit"
"""Name under which the function is registered."""


@dataclass
class Step:
    """One call of the text stack, as its attention function sees it.

    Attributes
    ----------
    cache : VisualCache
        The request's cache; it knows the step's tokens.
    keep_queries : bool
        Whether someone will score this step.
    queries : list of Tensor
        ``[B, H, n, d]`` of the current layer, one per chunk; emptied after each layer.
    scaling : float
        The current layer's factor of the attention logits.
    """

    cache: VisualCache
    keep_queries: bool = False
    queries: list[Tensor] = field(default_factory=list)
    scaling: float = 1.0


class Question:
    """Given in place of a :class:`Step`: what would the layer's queries and keys be?

    The layer runs up to its attention, which answers by raising :class:`Answer`: all that a family
    does to queries and keys is done, and nothing after it.
    """


class Answer(Exception):
    """Queries ``[B, H, n, d]`` and keys ``[B, G, n, d]``, RoPE applied, and the logits' factor."""

    def __init__(self, queries: Tensor, keys: Tensor, scaling: float) -> None:
        super().__init__()
        self.queries, self.keys, self.scaling = queries, keys, scaling


def conduit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    conduit: Step | Question | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend over what the request's cache holds in this layer.

    Parameters
    ----------
    query : Tensor
        ``[B, H, n, d]``, RoPE applied. ``key`` and ``value`` are in the cache already.
    sliding_window : int or None
        Of the layer, as the attention modules that have one pass it.

    Returns
    -------
    output : Tensor
        ``[B, n, H, d]``.
    weights : None
    """
    if conduit is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(conduit, Question):
        raise Answer(query, key, factor)
    if conduit.keep_queries:
        conduit.queries.append(query)
        conduit.scaling = factor
    layer = conduit.cache.layers[module.layer_idx]
    output = layer.attend(query, factor, sliding_window)
    return output.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make the function known to Transformers; harmless when repeated."""
    AttentionInterface.register(ATTENTION, conduit_attention)
