"""``ask --explain-plan``: what a plan will keep of a prompt, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from conduit_kv.engine.cost import Cost
from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.evict.base import FLOOR, EvictMethod, Scores
from conduit_kv.methods.flow import FlowMethod
from conduit_kv.methods.retrieve import RetrieveMethod
from conduit_kv.methods.reuse import ReuseMethod
from conduit_kv.view import LayerView

if TYPE_CHECKING:
    from conduit_kv.engine.vlm import VLM
    from conduit_kv.plan import Plan

__all__ = ["explain"]


def explain(vlm: VLM, plan: Plan, inputs: Mapping[str, Any]) -> Iterator[str]:
    """Lines that say how many tokens each layer will keep of a prompt.

    Parameters
    ----------
    vlm : VLM
    plan : Plan
    inputs : mapping
        From :meth:`VLM.process`.
    """
    ids = inputs["input_ids"][0].cpu()
    text_model = vlm.family.text_model(vlm.model)
    kinds = [
        str(vlm.family.layer_kind(text_model, layer))
        for layer in range(len(vlm.family.layers(text_model)))
    ]
    visual = int(vlm.family.visual_mask(vlm.model, ids).sum())
    yield f"plan {plan}"
    text = len(ids) - visual
    yield f"prompt: {len(ids)} tokens, {visual} visual and {text} text"
    reaching = [visual] * len(kinds)
    layout = vlm.family.layouts(vlm.model, [ids], inputs)[0] if visual else Layout.text_only(text)
    cost = Cost.of(vlm.family, text_model)

    def flops(counts: Sequence[int]) -> float:
        return cost.prefill([text + count for count in counts]).total

    for method in plan:
        if method.is_identity:
            yield f"{method.stage}: {method} does nothing; every layer keeps everything"
        elif isinstance(method, FlowMethod):
            method.check(len(kinds))
            schedule = method.schedule(len(kinds), layout, flops)
            if schedule is None:
                yield f"{method.stage}: {method} leaves all visual tokens everywhere"
                continue
            reaching = schedule.per_layer
            layout = layout.first_of(reaching[0])
            yield f"{method.stage}: visual tokens active, mean over layers: {schedule.formula()}"
            for count, layers in _by_count(range(len(kinds)), reaching):
                yield f"  layers {_runs(layers)}: {count} each"
            full = flops([visual] * len(kinds))
            yield f"  {100 * flops(reaching) / full:.1f} % of the full prefill's FLOPs"
        elif isinstance(method, ReuseMethod):
            counts = method.counts(visual, len(kinds))
            yield (
                f"reuse: {method.name} computes {method.count(visual)} of {visual} visual tokens "
                "again, mean over layers; the others come from the store"
            )
            if len(set(counts)) > 1:
                yield f"  by layer: {', '.join(map(str, counts))}"
        elif isinstance(method, EvictMethod):
            yield from _evict(vlm, method, text, reaching, kinds)
        elif isinstance(method, RetrieveMethod):
            seen = method.count(visual, vlm.bytes_per_token) if visual else 0
            yield f"{method.stage}: {method}: a question sees {seen} of {visual} visual tokens"
        else:
            yield f"{method.stage}: {method}"


def _evict(
    vlm: VLM, method: EvictMethod, text: int, visual: Sequence[int], kinds: Sequence[str]
) -> Iterator[str]:
    full = [number for number, kind in enumerate(kinds) if kind == "full"]
    others = [number for number, kind in enumerate(kinds) if kind != "full"]
    if others:
        yield f"layers {_runs(others)} are not causal full attention and are left alone"
    if not full:
        return
    most = [visual[layer] + (0 if method.of == "visual" else text) for layer in full]
    what = "visual tokens (all text besides)" if method.of == "visual" else "tokens"
    total = method.budget.total(most, _bytes_per_token(vlm))
    even = [[Scores(torch.zeros(count))] for count in most]
    floor = 0 if method.of == "visual" else min(FLOOR, *most)
    yield (
        f"evict: {method.name} keeps {total} of {sum(most)} {what} over {len(full)} "
        f"layers, {total / len(full):.1f} of {sum(most) / len(full):g} per layer in the mean"
    )
    if floor * len(full) > total:
        yield f"  the floor of {floor} tokens per layer is higher: {floor * len(full)} are kept"
    if depends_on_attention(method, len(full)):
        yield f"  how layers share it follows from their attention; a layer keeps at least {floor}"
    else:
        counts = method.layer_budgets(total, even, most)
        for count, layers in _by_count(full, counts):
            yield f"  layers {_runs(layers)}: {count} each"
    if method.per_head:
        yield "  the KV heads of a layer keep different numbers; these are their mean"
    yield f"  in decoding: {method.in_decode}"


def depends_on_attention(method: EvictMethod, layers: int) -> bool:
    """Whether layers get different budgets when they attend differently.

    Tried out: the method scores made-up layers twice, with different queries and keys.
    """
    layout = (
        Layout.text_only(4)
        .extend(Layout.of(torch.ones(16, dtype=torch.bool), [Grid(1, 4, 4)]))
        .extend(Layout.text_only(6))
    )
    size = len(layout)
    probe = method.replace(cover=0.0)
    shares = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        scores = []
        for layer in range(layers):
            keys = 2 * torch.randn(2, size, 8, generator=generator)
            queries = 2 * torch.randn(4, size, 8, generator=generator)
            view = LayerView(
                layer, layers, torch.arange(size), layout, keys, keys.clone(), queries, 0.35
            )
            scores.append([probe.score(view)])
        most = [int(layout.visual.sum()) if method.of == "visual" else size] * layers
        shares.append(probe.layer_budgets(sum(most) // 2, scores, most))
    return any(share != shares[0] for share in shares)


def _bytes_per_token(vlm: VLM) -> float:
    config = vlm.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return float(2 * heads * width * vlm.model.dtype.itemsize)


def _by_count(layers: Sequence[int], counts: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Layers by how many tokens they keep, in the order of the first of each."""
    found: dict[int, list[int]] = {}
    for layer, count in zip(layers, counts, strict=True):
        found.setdefault(count, []).append(layer)
    return list(found.items())


def _runs(layers: Sequence[int]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
