"""Prefill one image alone and keep what a later prompt needs of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from conduit_kv.compat import cache_name
from conduit_kv.errors import PlanError
from conduit_kv.families import Family
from conduit_kv.families.piece import Piece
from conduit_kv.reuse.entry import Entry

if TYPE_CHECKING:
    from conduit_kv.engine.compress import Run


@dataclass
class Recorder:
    """Listens to a prefill: position-free keys of some tokens, and what was merged in for them.

    Attributes
    ----------
    columns : Tensor
        ``[N]`` int64, the tokens.
    """

    family: Family
    columns: Tensor
    keys: list[Tensor] = field(default_factory=list)
    features: Tensor | None = None
    deepstack: list[Tensor] = field(default_factory=list)

    def begin(self, embeddings: Tensor, features: Mapping[str, Any]) -> None:
        """What reached the text model: embeddings ``[1, T, D]`` and its further arguments."""
        columns = self.columns = self.columns.to(embeddings.device)
        self.features = embeddings[0, columns]
        for added in features.get("deepstack_visual_embeds") or []:
            # [V, D] of the visual tokens, which are exactly the columns here.
            self.deepstack.append(added)

    def enter(self, layer: nn.Module, hidden: Tensor) -> None:
        """Hidden states ``[1, T, D]`` that enter a layer."""
        self.keys.append(self.family.keys(layer, hidden[:, self.columns])[0])


@torch.inference_mode()
def fill(
    run: Run,
    piece: Piece,
    prefix: Sequence[int] = (),
    *,
    digest: str = "",
) -> Entry:
    """Prefill an image alone after the tokens ``prefix``, from position 0.

    Parameters
    ----------
    run : Run
        Its model's forwards are wrapped (:func:`conduit_kv.engine.compress.wrapped`).
    piece : Piece
        From :meth:`Family.pieces`.
    prefix : sequence of int
        The chat template's tokens before a first image; none for a bare image.

    Raises
    ------
    PlanError
        If some layer is not causal full attention, or layers differ in the shape of their K/V.
    """
    family, model = run.family, run.model
    check_layers(family, model, "reuse")
    start = time.perf_counter()
    ids = torch.cat([torch.tensor(list(prefix), dtype=torch.long), piece.span])
    first = len(prefix) + piece.opening - int(piece.tokens[0])
    recorder = Recorder(family, piece.tokens + first)
    alone = run.alone()
    cache = alone.new_cache()
    cache.recorder = recorder
    inputs = {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in piece.inputs.items()
    }
    forward: Any = model.forward
    alone.model_forward(
        forward.__wrapped__,
        input_ids=ids[None].to(model.device),
        logits_to_keep=1,
        **inputs,
        **{cache_name(type(model)): cache},
    )
    values = [layer.read(0, range(layer.kv_heads))[2][:, recorder.columns] for layer in cache]
    shapes = {tuple(part.shape) for part in (*recorder.keys, *values)}
    if len(shapes) > 1 or recorder.features is None:
        raise PlanError(
            f"the layers' K and V have the shapes {sorted(shapes)}: reuse and retrieve want one"
        )
    features = recorder.features.clone()
    return Entry(
        digest=digest,
        keys=torch.stack(recorder.keys),
        values=torch.stack(values),
        features=features,
        deepstack=(
            torch.stack(recorder.deepstack)
            if recorder.deepstack
            else features.new_empty((0, *features.shape))
        ),
        positions=cache.progress.position_ids(0)[:, recorder.columns.cpu()],
        grid=piece.grid,
        seconds=time.perf_counter() - start,
    )


def check_layers(family: Family, model: Any, stage: str) -> None:
    """Raise PlanError unless every layer is causal full attention."""
    text_model = family.text_model(model)
    others = [
        number
        for number in range(len(family.layers(text_model)))
        if family.layer_kind(text_model, number) != "full"
    ]
    if others:
        raise PlanError(
            f"layers {others} have no causal full attention, so their K/V cannot be carried to "
            f"another place: drop the plan's {stage} stage"
        )
