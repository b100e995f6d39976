"""The slow reference: plain Transformers over a cache that is built by hand.

Every image's K before RoPE and V come from hooks on a plain forward of the image alone. Then the
prompt is gone through in order: text runs through the plain text model, which appends to a plain
``DynamicCache``; an image's chosen tokens are appended to that cache, K rotated to their places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from conduit_kv.compat import cache_name
from conduit_kv.engine.runner import State
from conduit_kv.families import family_of
from tests.reuse.test_entries import captured


@dataclass
class Alone:
    """An image prefilled alone: K before RoPE and V ``[L, G, n, d]``, and where it lies."""

    keys: Tensor
    values: Tensor
    tokens: Tensor


def alone(model: Any, inputs: Any, prefix: Sequence[int], start: int = 0) -> list[Alone]:
    """The images of a turn whose first token is number ``start`` of the conversation."""
    family = family_of(model)
    ids = inputs["input_ids"][0]
    (layout,) = family.layouts(model, [ids], inputs)
    found = []
    for piece in family.pieces(model, ids, inputs, layout):
        own = torch.cat([torch.tensor(list(prefix), dtype=torch.long), piece.span])
        arguments: dict[str, Any] = {"input_ids": own[None], **piece.inputs}
        if family.position_axes > 1:
            arguments["mm_token_type_ids"] = family.kinds(model, own)[None]
        keys, values = captured(model, family, arguments)
        visual = family.visual_mask(model, own)
        found.append(
            Alone(
                torch.stack([part[:, visual] for part in keys]),
                torch.stack([part[:, visual] for part in values]),
                piece.tokens + start,
            )
        )
    return found


@torch.inference_mode()
def by_hand(
    model: Any, ids: Tensor, images: Sequence[Alone], seen: Tensor, places: Tensor
) -> Tensor:
    """``[V]``, logits of the last token.

    Parameters
    ----------
    ids : Tensor
        ``[T]``, the whole conversation.
    seen : Tensor
        ``[n]`` ascending: the tokens that are there, all text among them.
    places : Tensor
        ``[axes, n]``, their position ids.
    """
    family = family_of(model)
    text = family.text_model(model)
    apply = __import__(
        type(text.layers[0].self_attn).__module__, fromlist=["x"]
    ).apply_rotary_pos_emb
    visual = family.visual_mask(model, ids)
    cache = DynamicCache(config=model.config.get_text_config())
    hidden = torch.empty(0)
    at = 0
    while at < len(seen):
        stop = at + 1
        while stop < len(seen) and visual[seen[stop]] == visual[seen[at]]:
            stop += 1
        run, place = seen[at:stop], places[:, at:stop]
        position = place[:, None] if family.position_axes > 1 else place
        if visual[run[0]]:
            cos, sin = text.rotary_emb(torch.zeros(1), position)
            for layer in range(len(text.layers)):
                keys, values = [], []
                for image in images:
                    mine = torch.nonzero(torch.isin(image.tokens, run)).flatten()
                    keys.append(image.keys[layer][:, mine])
                    values.append(image.values[layer][:, mine])
                key = torch.cat(keys, 1)[None]
                _, turned = apply(key, key, cos, sin)
                cache.update(turned, torch.cat(values, 1)[None], layer)
        else:
            output = text(
                inputs_embeds=text.get_input_embeddings()(ids[run])[None],
                position_ids=position,
                use_cache=True,
                **{cache_name(type(text)): cache},
            )
            hidden = output.last_hidden_state
        at = stop
    return model.lm_head(hidden[:, -1])[0]


def seen_by(state: State, chosen: Tensor) -> Tensor:
    """``[n]`` ascending: all text, and the chosen candidates."""
    cache: Any = state.cache
    layout = cache.progress.layouts[0]
    text = torch.nonzero(layout.text).flatten()
    return torch.cat([text, cache.retrieval.bank.places[chosen]]).sort().values
