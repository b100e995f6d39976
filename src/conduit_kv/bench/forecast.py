"""Memory and FLOPs of a model from its configuration alone: nothing is loaded, nothing is run.

The model is built on meta tensors, so that its shapes are those of its own classes. What a plan
changes follows from its budgets: the schedule of its reduce or route method, the share that evict
keeps, the bits of hold. What it cannot know is accuracy, and how well a machine does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from conduit_kv.engine.cost import Cost
from conduit_kv.errors import ModelError, PlanError
from conduit_kv.families import family_of
from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.evict import EvictMethod
from conduit_kv.methods.flow import FlowMethod
from conduit_kv.methods.hold.base import FULL_BITS, HoldMethod, Scene
from conduit_kv.plan import Plan

__all__ = ["KNOWN", "SIZES", "Forecast", "Shape", "forecast", "shape_of"]

KNOWN = ("qwen3-vl-8b", "internvl3-9b", "llava-next-7b")
"""Shapes that come with the package, by name: configuration files with their sizes alone."""
SIZES = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
_SCALES = 1.0
"""Bits per number for scales and zeros of packed groups: 2 x 16 for 32."""
_PROBE = 4096
"""Tokens on which a hold method is asked for its bits."""


@dataclass(frozen=True)
class Shape:
    """What a forecast needs to know of a model.

    Attributes
    ----------
    name : str
    layers : int
        Decoder layers with causal full attention; others are not counted among them.
    cost : Cost
    parts : dict
        Bytes of the weights by part.
    kv_token : int
        Bytes of K and V of one token in one layer.
    bits : int
        Of a number of the weights and the cache.
    """

    name: str
    layers: int
    cost: Cost
    parts: dict[str, int]
    kv_token: int
    bits: int

    @property
    def weights(self) -> int:
        return sum(self.parts.values())

    @property
    def decoder(self) -> int:
        """Bytes of weights that a decoding step reads."""
        return self.parts["decoder layers"] + self.parts["language head"]


@dataclass(frozen=True)
class Forecast:
    """One prompt of so many visual tokens.

    Attributes
    ----------
    visual, text : int
    kv_full, kv_plan : float
        Bytes of K and V after the prefill.
    prefill_full, prefill_plan : float
        FLOPs of the decoder layers over the prompt.
    step_full, step_plan : float
        FLOPs of one decoded token.
    read_full, read_plan : float
        Bytes that a decoding step reads: weights, and K and V.
    """

    visual: int
    text: int
    kv_full: float
    kv_plan: float
    prefill_full: float
    prefill_plan: float
    step_full: float
    step_plan: float
    read_full: float
    read_plan: float

    @property
    def kv_share(self) -> float:
        """Of the bytes that a decoding step reads, those of the full cache."""
        return self.kv_full / self.read_full

    @property
    def faster(self) -> float:
        """How much faster a step can be at best, where reading is what takes the time."""
        return self.read_full / self.read_plan


def shape_of(model: str | Path, dtype: torch.dtype = torch.bfloat16) -> Shape:
    """Build a model on meta tensors, and measure it.

    Parameters
    ----------
    model : str or Path
        A name of :data:`KNOWN`, a ``config.json``, or a folder with one.

    Raises
    ------
    ModelError
        If there is no such configuration, or its family is unknown.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = _settings(model)
    kind = settings.get("model_type")
    try:
        config = AutoConfig.for_model(**settings)
        with torch.device("meta"):
            built = AutoModelForImageTextToText.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{model}: no model can be built from it ({kind}): {error}") from None
    family = family_of(built)
    text_model = family.text_model(built)
    layers = family.layers(text_model)
    cost = Cost.of(family, text_model)
    size = dtype.itemsize
    decoder = sum(p.numel() for layer in layers for p in layer.parameters())
    head = built.get_output_embeddings()
    of_head = head.weight.numel() if head is not None else 0
    embeddings = built.get_input_embeddings().weight
    tied = head is not None and head.weight is embeddings
    every = sum(p.numel() for p in built.parameters())
    rest = every - decoder - of_head - (0 if tied else embeddings.numel())
    full = [n for n in range(len(layers)) if family.layer_kind(text_model, n) == "full"]
    return Shape(
        name=Path(str(model)).stem if _is_file(model) else str(model),
        layers=len(full),
        cost=cost,
        parts={
            "decoder layers": decoder * size,
            "language head": of_head * size,
            "embeddings": 0 if tied else embeddings.numel() * size,
            "image encoder and projector": rest * size,
        },
        kv_token=2 * cost.kv_heads * cost.head_dim * size,
        bits=8 * size,
    )


def _is_file(model: str | Path) -> bool:
    return str(model) not in KNOWN


def _settings(model: str | Path) -> dict[str, Any]:
    if str(model) in KNOWN:
        folder = resources.files("conduit_kv.bench").joinpath("configs")
        found = json.loads(folder.joinpath(f"{model}.json").read_text(encoding="utf-8"))
        return dict(found)
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}): name a config.json, a folder with one, or "
            f"{', '.join(KNOWN)}"
        ) from None
    if not isinstance(found, dict) or "model_type" not in found:
        raise ModelError(f"{path} is no configuration: it has no model_type")
    return found


def forecast(
    shape: Shape, plan: Plan, sizes: Sequence[int] = SIZES, text: int = 128
) -> list[Forecast]:
    """What a plan does to memory and FLOPs at several lengths.

    Parameters
    ----------
    sizes : sequence of int
        Visual tokens.
    text : int
        Text tokens besides.

    Raises
    ------
    PlanError
        If what a method of the plan does does not follow from its budget.
    """
    return [_at(shape, plan, size, text) for size in sizes]


def _at(shape: Shape, plan: Plan, visual: int, text: int) -> Forecast:
    active: list[int] = [visual] * shape.layers
    kept_visual, kept_text = float(visual * shape.layers), float(text * shape.layers)
    bits = float(shape.bits)
    for method in plan:
        if method.is_identity:
            continue
        if isinstance(method, FlowMethod):
            layout = _prompt(visual, text)
            schedule = method.schedule(
                shape.layers, layout, lambda counts: _prefill(shape, counts, text)
            )
            if schedule is not None:
                active = [min(a, b) for a, b in zip(active, schedule.per_layer, strict=True)]
            kept_visual = float(sum(active))
        elif isinstance(method, EvictMethod):
            kept_visual, kept_text = _evicted(shape, method, active, kept_visual, text)
        elif isinstance(method, HoldMethod):
            bits = _bits(method, shape.bits)
        else:
            raise PlanError(
                f"{method.name}: what the stage {method.stage} does depends on the request; a "
                "forecast knows reduce, route, evict and hold"
            )
    per_token = shape.kv_token
    kv_full = float(per_token * shape.layers * (visual + text))
    kv_plan = per_token * (kept_visual * bits / shape.bits + kept_text)
    held = (kept_visual + kept_text) / shape.layers
    return Forecast(
        visual=visual,
        text=text,
        kv_full=kv_full,
        kv_plan=kv_plan,
        prefill_full=_prefill(shape, [visual] * shape.layers, text),
        prefill_plan=_prefill(shape, active, text),
        step_full=shape.layers * shape.cost.layer(1, visual + text + 1).total,
        step_plan=shape.layers * shape.cost.layer(1, held + 1).total,
        read_full=shape.decoder + kv_full,
        read_plan=shape.decoder + kv_plan,
    )


def _prefill(shape: Shape, visual: Sequence[int], text: int) -> float:
    return shape.cost.prefill([count + text for count in visual]).total


def _prompt(visual: int, text: int) -> Layout:
    mask = torch.zeros(visual + text, dtype=torch.bool)
    before = text // 4
    mask[before : before + visual] = True
    return Layout.of(mask, [Grid(1, 1, visual)])


def _evicted(
    shape: Shape, method: EvictMethod, active: Sequence[int], kept_visual: float, text: int
) -> tuple[float, float]:
    """Visual and text tokens held, over all layers: text goes last, as text-first methods do."""
    counted = [count + (0 if method.of == "visual" else text) for count in active]
    total = method.budget.total(counted, float(shape.kv_token))
    whole = float(text * shape.layers)
    if method.of == "visual":
        return min(float(total), kept_visual), whole
    kept_text = min(whole, float(total))
    return min(kept_visual, total - kept_text), kept_text


def _bits(method: HoldMethod, full: int) -> float:
    """Bits per number of a visual token, scales included, asked of the method itself."""
    layout = Layout.of(torch.ones(_PROBE, dtype=torch.bool), [Grid(1, 64, _PROBE // 64)])
    similar = torch.linspace(-1, 1, 64)
    chosen = method.bits_of(Scene(layout, lambda: similar), torch.arange(_PROBE)).float()
    packed = chosen < FULL_BITS
    plain = getattr(method, "name", "") == "fp8"
    return float(torch.where(packed, chosen + (0 if plain else _SCALES), float(full)).mean())
