"""The reference for r < 1: plain Transformers over a cache built by hand.

Each image is prefilled alone by the plain model; its keys are caught before RoPE and turned to
their places by the textbook formula. The text then runs over them as new tokens of a plain
``DynamicCache`` (stage 1), and so do the chosen visual tokens with the query span (stage 2). Slots
of the cache lie in whatever order; a mask says which token sees which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from conduit_kv.families.piece import Piece
from tests.contracts.helpers import eager, with_cache
from tests.families.helpers import reaching_text_model
from tests.reuse.test_entries import captured


def rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``[G, n, d]`` turned by ``[n, d]``."""
    half = keys.shape[-1] // 2
    return keys * cos + torch.cat([-keys[..., half:], keys[..., :half]], -1) * sin


class ByHand:
    """One prompt, its images prefilled alone after ``prefix``."""

    def __init__(
        self,
        model: Any,
        family: Any,
        inputs: Mapping[str, Any],
        pieces: Sequence[Piece],
        prefix: Sequence[int],
    ) -> None:
        self.model, self.family, self.pieces = model, family, pieces
        self.text_model = family.text_model(model)
        ids = inputs["input_ids"][0]
        given = reaching_text_model(family, model, model, **inputs)
        self.embeds = given["inputs_embeds"]
        positions = family.relative_positions(model, [ids], inputs)[0]
        self.positions = positions if positions.dim() == 2 else positions[None]
        self.deepstack = given.get("deepstack_visual_embeds") or []
        self.visual = family.visual_mask(model, ids)
        wide = self.positions[:, None] if family.position_axes > 1 else self.positions
        cos, sin = self.text_model.rotary_emb(torch.zeros(1, 1), wide)
        layers = len(self.text_model.layers)
        self.keys: list[dict[int, Tensor]] = [{} for _ in range(layers)]
        self.values: list[dict[int, Tensor]] = [{} for _ in range(layers)]
        self.raw: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(layers)]
        for piece in pieces:
            alone_ids = torch.cat([torch.tensor(list(prefix), dtype=torch.long), piece.span])
            alone: dict[str, Any] = {"input_ids": alone_ids[None], **piece.inputs}
            if family.position_axes > 1:
                alone["mm_token_type_ids"] = family.kinds(model, alone_ids)[None]
            keys, values = captured(model, family, alone)
            mine = family.visual_mask(model, alone_ids)
            for layer in range(layers):
                turned = rotated(keys[layer][:, mine], cos[0, piece.tokens], sin[0, piece.tokens])
                for at, token in enumerate(piece.tokens.tolist()):
                    self.keys[layer][token] = turned[:, at]
                    self.values[layer][token] = values[layer][:, mine][:, at]
                    raw = keys[layer][:, mine][:, at], values[layer][:, mine][:, at]
                    self.raw[layer][token] = raw
        self.change: list[dict[int, float]] = [{} for _ in range(layers)]
        self.attention: list[Tensor] = []
        self.columns: list[int] = []

    def run(self, rows: Sequence[int]) -> Tensor:
        """Run some tokens over the others; gives their last hidden states ``[n, D]``."""
        rows = list(rows)
        old = [token for token in sorted(self.keys[0]) if token not in rows]
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if old:
                cache.update(
                    torch.stack([keys[token] for token in old], 1)[None],
                    torch.stack([values[token] for token in old], 1)[None],
                    layer,
                )
        self.columns = [*old, *rows]
        at, columns = torch.tensor(rows), torch.tensor(self.columns)
        mask = torch.zeros(1, 1, len(rows), len(columns))
        mask.masked_fill_(columns > at[:, None], torch.finfo(mask.dtype).min)
        positions = self.positions[:, at]
        wide = positions[:, None] if self.family.position_axes > 1 else positions
        extra: dict[str, Any] = {}
        visual = self.visual[at]
        if self.deepstack and bool(visual.any()):
            number = self.visual.long().cumsum(0) - 1
            chosen = number[at[visual]]
            extra = {
                "visual_pos_masks": visual[None],
                "deepstack_visual_embeds": [added[chosen] for added in self.deepstack],
            }
        with torch.inference_mode(), eager(self.text_model):
            output = self.text_model(
                inputs_embeds=self.embeds[:, at],
                attention_mask=mask,
                position_ids=wide,
                output_attentions=True,
                use_cache=True,
                **with_cache(self.text_model, cache),
                **extra,
            )
        self.attention = list(output.attentions)
        for layer in range(len(self.keys)):
            part = cache.layers[layer]
            for place, token in enumerate(rows, start=len(old)):
                self.keys[layer][token] = part.keys[0, :, place]
                self.values[layer][token] = part.values[0, :, place]
        return output.last_hidden_state[0]

    def run_layer_by_layer(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Run in each layer its own rows, of which each layer has some of the one before.

        Gives the last hidden states of the rows of the last layer.
        """
        hidden = {token: self.embeds[0, token] for token in range(self.embeds.shape[1])}
        wide = self.positions[:, None] if self.family.position_axes > 1 else self.positions
        cos, sin = self.text_model.rotary_emb(torch.zeros(1, 1), wide)
        number = (self.visual.long().cumsum(0) - 1).tolist()
        with torch.inference_mode(), eager(self.text_model):
            for level, mine in enumerate(rows):
                old = [token for token in sorted(self.keys[level]) if token not in mine]
                cache = DynamicCache()
                for token in rows[level - 1] if level else []:
                    if bool(self.visual[token]):
                        self.change[level][token] = self._change(level, token, hidden[token])
                if old:
                    cache.update(
                        torch.stack([self.keys[level][token] for token in old], 1)[None],
                        torch.stack([self.values[level][token] for token in old], 1)[None],
                        level,
                    )
                at, columns = torch.tensor(mine), torch.tensor([*old, *mine])
                mask = torch.zeros(1, 1, len(mine), len(columns))
                mask.masked_fill_(columns > at[:, None], torch.finfo(mask.dtype).min)
                module = self.text_model.layers[level]
                output = module(
                    torch.stack([hidden[token] for token in mine])[None],
                    attention_mask=mask,
                    position_ids=None,
                    position_embeddings=(cos[:, at], sin[:, at]),
                    use_cache=True,
                    **with_cache(module, cache),
                )
                output = (output[0] if isinstance(output, tuple) else output)[0]
                for place, token in enumerate(mine):
                    self.keys[level][token] = cache.layers[level].keys[0, :, len(old) + place]
                    self.values[level][token] = cache.layers[level].values[0, :, len(old) + place]
                    hidden[token] = output[place]
                    if level < len(self.deepstack) and bool(self.visual[token]):
                        hidden[token] = hidden[token] + self.deepstack[level][number[token]]
            states = torch.stack([hidden[token] for token in rows[-1]])
            return self.text_model.norm(states)  # type: ignore[no-any-return]

    def _change(self, level: int, token: int, hidden: Tensor) -> float:
        """How far a token's position-free K and V are from those of its image alone."""
        layer = self.text_model.layers[level]
        attention, x = layer.self_attn, layer.input_layernorm(hidden)
        keys = attention.k_proj(x).unflatten(-1, (-1, attention.head_dim))
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        values = attention.v_proj(x).unflatten(-1, (-1, attention.head_dim))
        raw_keys, raw_values = self.raw[level][token]
        return float((keys - raw_keys).norm() + (values - raw_values).norm())

    def logits(self, states: Tensor) -> Tensor:
        """``[V]`` of the newest token."""
        with torch.inference_mode():
            return self.model.lm_head(states[-1])
