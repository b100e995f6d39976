"""What plans leave of a few items, layer by layer and stage by stage, to be looked at."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from conduit_kv.bench.protocols import Prompt, forks_of
from conduit_kv.picture import Retention
from conduit_kv.plan import Plan

if TYPE_CHECKING:
    from conduit_kv.engine.vlm import VLM

__all__ = ["look", "plain", "thumbnail"]

_SIDE = 320
"""Pixels of the longer side of an image that is kept to be looked at."""


def look(vlm: VLM, prompt: Prompt, plans: Sequence[Plan]) -> list[dict[str, Retention]]:
    """What each plan leaves of a prompt when its answer begins, after each of its stages.

    A stage's share is told by the plan's beginning up to it, so that it costs a prefill for each
    beginning in which plans differ before eviction.

    Returns
    -------
    list of dict
        Per plan: stage to :class:`.Retention`, in the order of the stages; the last one is what
        the whole plan leaves.
    """
    begun = [_beginnings(plan) for plan in plans]
    wanted = list(dict.fromkeys(part for parts in begun for part in parts.values()))
    forks = dict(zip(wanted, forks_of(vlm, prompt, wanted), strict=True))
    return [
        {stage: Retention.of(forks[part].cache) for stage, part in parts.items()} for parts in begun
    ]


def _beginnings(plan: Plan) -> dict[str, Plan]:
    acting = [method for method in plan if not method.is_identity]
    return {method.stage: Plan(tuple(acting[: number + 1])) for number, method in enumerate(acting)}


def plain(retention: Retention) -> dict[str, Any]:
    """A retention as plain data.

    ``cells`` are base64 of uint8 ``[layers, rows, columns]``: 255 is held by all KV heads of a
    layer.
    """
    layout = retention.layout
    text = retention.held[:, layout.text.numpy()]
    images = []
    for number, grid in enumerate(layout.grids):
        mine = retention.held[:, (layout.image == number).numpy()]
        cells = np.stack([retention.map(number, slice(n, n + 1)) for n in range(retention.layers)])
        images.append(
            {
                "rows": grid.rows,
                "columns": grid.columns,
                "share": _rounded(mine.mean(1) if mine.size else mine.sum(1)),
                "cells": base64.b64encode(
                    (255 * cells).round().astype(np.uint8).tobytes()
                ).decode(),
            }
        )
    return {
        "layers": retention.layers,
        "text": _rounded(text.mean(1) if text.size else text.sum(1)),
        "images": images,
    }


def _rounded(shares: np.ndarray) -> list[float]:
    return [round(float(share), 4) for share in shares]


def thumbnail(image: Image.Image) -> str:
    """An image as a ``data:`` address, small enough for a page."""
    small = image.convert("RGB")
    small.thumbnail((_SIDE, _SIDE))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()
