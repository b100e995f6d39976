"""The decoder loop: the one forward that Conduit takes over.

It runs the model's own decoder layers, one after the other, and gives every stage its moment
between them. Layers are the outer loop and chunks of tokens the inner one, so that a chunked
prefill is the whole one with less memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from conduit_kv.attention import ATTENTION, Step, register_attention
from conduit_kv.compat import cache_name, text_output
from conduit_kv.families import Family

if TYPE_CHECKING:
    from conduit_kv.engine.request import JoinedCache, RequestCache


@contextmanager
def attending(text_model: nn.Module) -> Iterator[None]:
    """Let the text model's attention modules call Conduit's function; restored on any exit."""
    register_attention()
    config: Any = text_model.config
    before = config._attn_implementation_internal
    config._attn_implementation_internal = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def run_stack(
    family: Family,
    text_model: nn.Module,
    cache: RequestCache | JoinedCache,
    embeddings: Tensor,
    position_ids: Tensor,
    features: Mapping[str, Any],
    *,
    chunk: int | None = None,
    evict: bool = True,
    output_hidden_states: bool = False,
) -> BaseModelOutputWithPast:
    """Run the step's tokens through all decoder layers.

    Parameters
    ----------
    embeddings : Tensor
        ``[B, n, hidden]``, images merged in. ``cache.progress`` has taken the tokens in already.
    position_ids : Tensor
        ``[B, n]``, or ``[3, B, n]`` for M-RoPE.
    features : mapping
        Further arguments of the text model (deepstack).
    chunk : int or None
        Run at most so many columns at a time within each layer.
    evict : bool
        Whether the step ends a prefill or a turn. A single column is a decoding step.
    """
    progress, hidden = cache.progress, embeddings
    columns = hidden.shape[1]
    progress.step_tokens = progress.step_tokens.to(hidden.device)
    deciding = evict and columns > 1 and cache.scores_turns
    decoding = columns == 1 and cache.scores_steps
    step = Step(cache, keep_queries=deciding or decoding)
    if columns > 1:
        cache.take_in(embeddings)
    if deciding:
        cache.begin()
    rotary: tuple[Tensor, Tensor] = text_model.rotary_emb(hidden, position_ids)  # type: ignore
    states = [hidden] if output_hidden_states else []
    whole = progress.step_tokens
    with attending(text_model):
        for number, layer in enumerate(family.layers(text_model)):
            cache.enter(layer, hidden)
            arguments = {cache_name(type(layer)): cache, "use_cache": True, "conduit": step}
            parts = []
            for start in range(0, columns, chunk or columns):
                part = slice(start, start + (chunk or columns))
                progress.step_tokens = whole[:, part]
                output = layer(
                    hidden[:, part],
                    attention_mask=None,
                    position_ids=None,
                    position_embeddings=tuple(x[..., part, :] for x in rotary),
                    **arguments,
                )
                parts.append(output[0] if isinstance(output, tuple) else output)
            progress.step_tokens = whole
            hidden = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            if output_hidden_states:
                states.append(hidden)  # as Transformers has it: without what a family adds
            hidden = family.after_layer(text_model, number, hidden, features)
            if step.keep_queries:
                queries = step.queries[0] if len(parts) == 1 else torch.cat(step.queries, dim=2)
                step.queries.clear()
                if deciding:
                    cache.observe(number, queries, step.scaling)
                else:
                    cache.step(number, queries, step.scaling)
    if deciding:
        cache.finish()
    hidden = text_model.norm(hidden)  # type: ignore[operator]
    if output_hidden_states:
        states[-1] = hidden
    return text_output(hidden, cache, tuple(states) or None)
