"""A question as retrieval sees it: its own states in the first layers, without any image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conduit_kv.compat import cache_name
from conduit_kv.families import Family
from conduit_kv.layout import Layout
from conduit_kv.retrieve.bank import Bank
from conduit_kv.reuse.rotate import columns_of, rotary_of, rotate
from conduit_kv.stack import attending


def early_states(
    family: Family,
    text_model: nn.Module,
    embeddings: Tensor,
    layers: int,
    position_ids: Tensor | None = None,
    features: Mapping[str, Any] | None = None,
    *,
    cache: Any = None,
    mask: Tensor | None = None,
) -> list[Tensor]:
    """Hidden states of a prompt by itself, as they enter each of the first layers.

    Gradients flow. Rows see themselves and what comes before, so that
    sequences of different length are padded at the end.

    Parameters
    ----------
    embeddings : Tensor
        ``[B, n, D]``.
    layers : int
        Layers that are run; 0 runs none.
    position_ids : Tensor or None
        ``[B, n]``, or ``[3, B, n]`` for M-RoPE; counted from 0 by default, as for text alone.
    features : mapping or None
        Further arguments of the text model (deepstack).
    cache : object, optional
        With Transformers' ``update``: gives the K and V that the rows attend to.
    mask : Tensor, optional
        ``[B, 1, n, S]`` bool, what they see of them.

    Returns
    -------
    list of Tensor
        ``[B, n, D]`` entering layers 0 to ``layers``.
    """
    if position_ids is None:
        columns = torch.arange(embeddings.shape[1], device=embeddings.device)
        axes = family.position_axes
        shape = (axes, len(embeddings), -1) if axes > 1 else (len(embeddings), -1)
        position_ids = columns.expand(shape)
    rotary = text_model.rotary_emb(embeddings, position_ids)  # type: ignore[operator]
    states = [embeddings]
    with attending(text_model):
        for number, layer in enumerate(family.layers(text_model)[:layers]):
            output = layer(
                states[-1],
                attention_mask=mask,
                position_ids=None,
                position_embeddings=rotary,
                use_cache=cache is not None,
                **{cache_name(type(layer)): cache},
            )
            hidden = output[0] if isinstance(output, tuple) else output
            if features is not None:
                hidden = family.after_layer(text_model, number, hidden, features)
            states.append(hidden)
    return states


@dataclass
class Question:
    """What a retrieve method may ask of a question and of the images it can choose from.

    Attributes
    ----------
    family, text_model
        Of the model.
    bank : Bank
        The ``N`` candidates, in units.
    layout : Layout
        Of the whole sequence.
    prefix : Tensor
        ``[P, D]``, input embeddings of the text that images were prefilled after.
    rows : Tensor
        ``[Q, D]``, input embeddings of the question.
    """

    family: Family
    text_model: nn.Module
    bank: Bank
    layout: Layout
    prefix: Tensor
    rows: Tensor
    _states: list[Tensor] = field(default_factory=list)

    @property
    def n_layers(self) -> int:
        """``L``."""
        return len(self.family.layers(self.text_model))

    def layer(self, number: int) -> nn.Module:
        """A decoder layer."""
        return self.family.layers(self.text_model)[number]

    @property
    def unit(self) -> Tensor:
        """``[N]`` int64, the unit of each candidate."""
        return self.bank.unit

    def hidden(self, layer: int) -> Tensor:
        """``[P + Q, D]``: states of prefix and question that enter a layer."""
        if layer >= len(self._states):
            text = torch.cat([self.prefix, self.rows])[None]
            self._states = early_states(self.family, self.text_model, text, layer)
        return self._states[layer][0]

    def asking(self, token: Tensor, layers: Sequence[int]) -> list[Tensor]:
        """``[Q + 1, D]`` each: states entering ``layers`` of the question and an embedding ``[D]``
        after it."""
        text = torch.cat([self.prefix, self.rows, token[None].to(self.rows)])[None]
        states = early_states(self.family, self.text_model, text, max(layers))
        return [states[layer][0, len(self.prefix) :] for layer in layers]

    def queries(self, layer: int) -> Tensor:
        """``[H, Q, d]``, position-free queries of the question."""
        rows = self.hidden(layer)[None, len(self.prefix) :]
        return self.family.queries(self.layer(layer), rows)[0]

    def rotated(self, layer: int) -> tuple[Tensor, Tensor]:
        """Queries ``[H, Q, d]`` and text keys ``[G, P + Q, d]``, the question after one image.

        Every image is asked as if it stood alone before the question: the question's positions
        begin beyond the largest that any image's tokens had.
        """
        prefix, count = len(self.prefix), len(self.rows)
        largest = max((int(places.max()) for places in self.bank.positions), default=prefix - 1)
        axes = self.family.position_axes
        ids = torch.cat([torch.arange(prefix), torch.arange(count) + largest + 1])
        rotary = rotary_of(self.text_model, ids.expand(axes, -1))
        keys = self.family.keys(self.layer(layer), self.hidden(layer)[None])[0]
        mine = columns_of(rotary, torch.arange(prefix, prefix + count))
        queries = rotate(self.family, self.text_model, self.queries(layer), mine)
        return queries, rotate(self.family, self.text_model, keys, rotary)

    def keys(self, layer: int, *, turned: bool = False) -> Iterator[Tensor]:
        """Per unit, ``[G, n, d]``: position-free keys, or as they were in the image's prefill."""
        for unit, places in enumerate(self.bank.positions):
            keys = self.bank.part(unit, ("keys", layer))
            if turned:
                rotary = rotary_of(self.text_model, places)
                keys = rotate(self.family, self.text_model, keys, rotary)
            yield keys

    def values(self, layer: int) -> Iterator[Tensor]:
        """Per unit, ``[G, n, d]``."""
        for unit in range(len(self.bank)):
            yield self.bank.part(unit, ("values", layer))

    def features(self) -> Iterator[Tensor]:
        """Per unit, ``[n, D]``: what the image encoder gave, as merged into the input."""
        for unit in range(len(self.bank)):
            yield self.bank.part(unit, ("features", None))
