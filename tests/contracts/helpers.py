"""What the contract tests share: plans, prompts, the plain model, and a slow reference.

The reference is one forward of the plain model over a whole conversation, layer by layer with
Transformers' eager attention, in which each row may see only what its layer still held when the
row ran.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor
from transformers import PreTrainedModel

from conduit_kv import compress
from conduit_kv.compat import cache_name
from conduit_kv.engine.report import Report
from conduit_kv.engine.request import RequestCache
from conduit_kv.families import family_of
from conduit_kv.methods.base import registry
from conduit_kv.methods.evict import EvictMethod
from conduit_kv.methods.flow import FlowMethod
from conduit_kv.plan import Plan
from tests.families.helpers import reaching_text_model
from tests.tiny import FAMILY_NAMES, tiny_model
from tests.tiny.models import TINY
from tests.tiny.parts import picture

TOLERANCE = 1e-5
"""Largest difference of two logits in fp32, as a share of the largest logit of the two runs.

Both sides sum the same products in another order: fp32 rounding of about 1e-7 per sum, amplified
by four layers."""

EVICT = tuple(sorted(n for n, m in registry().items() if issubclass(m, EvictMethod)))
"""Names of all evict methods."""

FLOWS = tuple(sorted(n for n, m in registry().items() if issubclass(m, FlowMethod)))
"""Names of all reduce and route methods."""

_FOR_SHORT_PROMPTS = {
    "snapkv": "window=4, kernel=3",
    "pyramidkv": "window=4, kernel=3",
    "ada-kv": "window=4, kernel=3",
}
_WITHOUT_MERGING = {"look-m": "merge_by=none"}


def plan_of(method: str, budget: float | int | str = 0.4, *options: str, merge: bool = True) -> str:
    """A plan's text. Windows are smaller than the tiny prompts.

    Parameters
    ----------
    merge : bool
        False leaves out the merging of evicted tokens into kept ones, which no mask can express.
    """
    if method == "full":
        return "full"
    given = [*options]
    if method in _FOR_SHORT_PROMPTS:
        given.append(_FOR_SHORT_PROMPTS[method])
    if not merge and method in _WITHOUT_MERGING:
        given.append(_WITHOUT_MERGING[method])
    return f"{method}:{budget}" + (f"({', '.join(given)})" if given else "")


def sampled(rounds: int, step: int = 4) -> list[tuple[str, str]]:
    """``rounds`` families for each method, every family in turn."""
    count = len(FAMILY_NAMES)
    return [
        (FAMILY_NAMES[(number + turn * step) % count], method)
        for turn in range(rounds)
        for number, method in enumerate(EVICT)
    ]


def examples(count: int) -> Any:
    """Settings of a property test: the same ``count`` examples every time."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


# -- prompts -------------------------------------------------------------------------------------

Size = tuple[int, int]
SIZES: tuple[Size, ...] = ((28, 42), (42, 28), (56, 28), (28, 28))


def process(
    name: str, texts: Sequence[str], images: Sequence[Sequence[Any]], **options: Any
) -> dict[str, Tensor]:
    """What the processor of ``name`` gives for a batch; ``images`` one list per sequence."""
    tiny, (_, processor) = TINY[name], tiny_model(name)
    arguments: dict[str, Any] = {"text": list(texts), "return_tensors": "pt", "padding": True}
    if any(images):
        flat = [image for mine in images for image in mine]
        arguments["images"] = [list(mine) for mine in images] if tiny.nested else flat
    return dict(processor(**arguments | options))


def text_of(name: str, images: int, question: str, *, first: bool = True) -> str:
    """A user's turn with its images before the question, as the family writes it."""
    tiny = TINY[name]
    start = tiny.start if first else tiny.start.removeprefix("<|begin_of_text|>")
    return start + "Look " + " and ".join([tiny.image] * images) + question + tiny.end


def turn(
    name: str,
    images: int,
    question: str = " What is this?",
    *,
    seed: int = 0,
    sizes: Sequence[Size] = SIZES,
    first: bool = True,
) -> dict[str, Tensor]:
    """Inputs of one turn of one sequence."""
    pictures = [picture(*sizes[n % len(sizes)], seed * 10 + n) for n in range(images)]
    return process(name, [text_of(name, images, question, first=first)], [pictures])


def batch_and_singles(
    name: str, images: Sequence[int] = (2, 0, 1), sizes: Sequence[Size] = SIZES
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A batch padded on the left, and its sequences one by one."""
    texts = [
        text_of(name, count, " Where is the dog?" + " please" * number)
        for number, count in enumerate(images)
    ]
    stock = iter(picture(*sizes[n % len(sizes)], n) for n in range(sum(images)))
    pictures = [[next(stock) for _ in range(count)] for count in images]
    singles = [process(name, [t], [p]) for t, p in zip(texts, pictures, strict=True)]
    return process(name, texts, pictures), singles


def tokens(*ids: int) -> dict[str, Tensor]:
    """Inputs of a few text tokens."""
    return {"input_ids": torch.tensor([ids])}


def joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Inputs of one sequence that says what ``parts`` say, one after the other."""
    whole: dict[str, Tensor] = {}
    names = dict.fromkeys(name for part in parts for name in part)
    for name in names:
        values = [part[name] for part in parts if name in part]
        if name == "mm_token_type_ids":
            values = [part.get(name, torch.zeros_like(part["input_ids"])) for part in parts]
        if name == "attention_mask":
            values = [torch.ones_like(part["input_ids"]) for part in parts]
        if name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            whole[name] = torch.cat(values, dim=1)
        elif name in ("pixel_values", "pixel_attention_mask") and values[0].dim() >= 4:
            # [1, images, ...] of Idefics3; [images, tiles, ...] of the any-resolution families.
            nested = "pixel_attention_mask" in names
            whole[name] = _padded_cat(values, dim=1 if nested else 0)
        else:
            whole[name] = torch.cat(values)
    return whole


def _padded_cat(values: Sequence[Tensor], dim: int) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    padded = []
    for value in values:
        target = [*shape]
        target[dim] = value.shape[dim]
        blank = value.new_zeros(target)
        blank[tuple(slice(size) for size in value.shape)] = value
        padded.append(blank)
    return torch.cat(padded, dim=dim)


# -- the plain model -----------------------------------------------------------------------------


@contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Let the plain model run, and take back the M-RoPE state that it writes on itself."""
    inner = model.model
    deltas = getattr(inner, "rope_deltas", None)
    try:
        with torch.inference_mode():
            yield
    finally:
        if hasattr(inner, "rope_deltas"):
            inner.rope_deltas = deltas


def plain_logits(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """``[B, T, V]``."""
    with as_it_was(model):
        return model(**inputs).logits


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest value."""
    assert found.shape == expected.shape
    assert bool(torch.isfinite(found).all())
    return float((found - expected).abs().max() / expected.abs().max())


def with_cache(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """The cache as the release's own argument."""
    return {cache_name(type(model)): cache}


# -- conversations and their slow reference --------------------------------------------------------


@dataclass
class Step:
    """Rows that ran together, and what was held before them.

    Attributes
    ----------
    start, stop : int
        The rows.
    before : list of list of Tensor
        Per layer, per KV head: the tokens held when the step began.
    """

    start: int
    stop: int
    before: list[list[Tensor]]


@dataclass
class Run:
    """A conversation that was run under a plan."""

    logits: Tensor
    steps: list[Step]
    cache: RequestCache

    @property
    def held(self) -> list[list[Tensor]]:
        return held(self.cache)

    @property
    def notes(self) -> tuple[str, ...]:
        return Report.of(self.cache).notes


def held(cache: RequestCache, row: int = 0) -> list[list[Tensor]]:
    """Per layer, per KV head: the tokens held of a sequence."""
    return [[layer.held(row, head) for head in range(layer.kv_heads)] for layer in cache]


def same_held(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


def converse(
    model: PreTrainedModel,
    plan: Plan | str,
    parts: Sequence[Mapping[str, Any]],
    *,
    chunk: int | None = None,
    cache: RequestCache | None = None,
) -> Run:
    """Run ``parts``, one step each, on one cache; all of one sequence."""
    logits, steps = [], []
    with torch.inference_mode(), compress(model, plan, prefill_chunk=chunk) as run:
        cache = cache or run.new_cache()
        for part in parts:
            start = cache.get_seq_length()
            before = held(cache)
            part = {name: value for name, value in part.items() if name != "attention_mask"}
            output = model(**part, **with_cache(model, cache))
            logits.append(output.logits[0])
            steps.append(Step(start, cache.get_seq_length(), before))
    return Run(torch.cat(logits) if logits else torch.empty(0), steps, cache)


@contextmanager
def eager(text_model: Any) -> Iterator[None]:
    config = text_model.config
    before = config._attn_implementation_internal
    config._attn_implementation_internal = "eager"
    try:
        yield
    finally:
        config._attn_implementation_internal = before


def visible(steps: Sequence[Step], layer: int, heads: int) -> Tensor:
    """``[H, T, T]`` bool: what each row may see in a layer."""
    length = steps[-1].stop
    seen = torch.zeros(heads, length, length, dtype=torch.bool)
    for step in steps:
        rows = slice(step.start, step.stop)
        own = step.stop - step.start
        seen[:, rows, rows] = torch.ones(own, own).tril().bool()
        for number, old in enumerate(step.before[layer] if step.start else ()):
            group = heads // len(step.before[layer])
            mine = slice(number * group, (number + 1) * group)
            seen[mine, rows] = seen[mine, rows].index_fill(2, old, True)
    return seen


def active(cache: RequestCache, row: int = 0) -> list[Tensor]:
    """Per layer ``[T]`` bool: the tokens that ran in it, as the flows' decisions say."""
    length = cache.progress.counts[row]
    ran = [torch.ones(length, dtype=torch.bool) for _ in cache]
    for flow in cache.flows:
        for decision in flow.decisions:
            visual = cache.progress.layouts[row].visual
            mine = torch.zeros(length, dtype=torch.bool)
            mine[decision.first[row] : decision.stop[row]] = True
            for layer in range(decision.layer, len(ran)):
                # What a stage has chosen holds until the next one says otherwise.
                ran[layer][mine & visual] = False
                ran[layer][decision.active[row]] = True
    return ran


def reference(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    steps: Sequence[Step],
    ran: Sequence[Tensor] | None = None,
) -> Tensor:
    """``[T, V]``: one forward over the whole conversation, each row blind to what was gone.

    With ``ran``, per layer ``[T]`` bool, a layer is given those rows alone, gathered and scattered.
    """
    family = family_of(model)
    text = family.text_model(model)
    given = reaching_text_model(family, model, model, **inputs)
    with torch.inference_mode(), eager(text):
        hidden = given["inputs_embeds"]
        length = hidden.shape[1]
        assert length == steps[-1].stop
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(length)[None]
        rotary = text.rotary_emb(hidden, positions[-3:] if positions.dim() == 3 else positions)
        deepstack = given.get("deepstack_visual_embeds") or []
        for number, layer in enumerate(text.layers):
            seen = visible(steps, number, text.config.num_attention_heads)
            if family.layer_kind(text, number) == "sliding":
                seen &= ~torch.ones(length, length).tril(-text.config.sliding_window).bool()
            rows = torch.arange(length) if ran is None else torch.nonzero(ran[number]).flatten()
            seen = seen[:, rows][..., rows]
            mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(hidden.dtype).min)
            output = layer(
                hidden[:, rows],
                attention_mask=mask[None],
                position_ids=None,
                position_embeddings=tuple(part[..., rows, :] for part in rotary),
                use_cache=False,
            )
            hidden = hidden.index_copy(1, rows, output[0] if isinstance(output, tuple) else output)
            if number < len(deepstack):
                hidden = hidden.clone()
                hidden[given["visual_pos_masks"]] += deepstack[number]
        return model.lm_head(text.norm(hidden))[0]


def fingerprint(model: PreTrainedModel) -> dict[tuple[str, str], Any]:
    """All that each module carries: attributes, hooks, weights by identity, configurations."""
    state: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                state[name, key] = {k: id(v) for k, v in value.items()}
            elif hasattr(value, "to_dict"):
                attention = getattr(value, "_attn_implementation_internal", None)
                state[name, key] = (id(value), copy.deepcopy(value.to_dict()), attention)
            elif isinstance(value, Tensor):
                state[name, key] = (id(value), value.tolist())
            else:
                state[name, key] = repr(value)
    return state
