"""Where time and memory go on a loaded model, and from how many images on a plan pays."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

from conduit_kv.plan import Plan

if TYPE_CHECKING:
    from conduit_kv.engine.vlm import VLM

__all__ = ["Phases", "Profile", "measure_phases", "profile"]

_SIDE = 224
_QUESTION = "What is in these pictures?"
_BOTTLENECK = 0.2
"""Where K/V are less than this share of what a step reads, less of them hardly makes it faster."""


@dataclass(frozen=True)
class Phases:
    """One prompt and its answer under one plan.

    Attributes
    ----------
    plan : str
    images, tokens : int
        Of the prompt.
    encode_s, prefill_s, step_s : float
        Image encoder; text stack over the prompt, scoring and eviction included; one more token.
    kv_bytes, weight_bytes : int
        Held K and V; weights that a step reads.
    bytes_by_kind : dict
        Allocated bytes.
    prefill_flops, step_flops : float
        Of the decoder layers.
    notes : tuple of str
    """

    plan: str
    images: int
    tokens: int
    encode_s: float
    prefill_s: float
    step_s: float
    kv_bytes: int
    weight_bytes: int
    bytes_by_kind: dict[str, int]
    prefill_flops: float
    step_flops: float
    notes: tuple[str, ...]

    @property
    def kv_share(self) -> float:
        """Of the bytes that a step reads, those of K and V."""
        return self.kv_bytes / (self.kv_bytes + self.weight_bytes)

    def total(self, new: int) -> float:
        """Seconds of a whole answer of ``new`` tokens; the first comes with the prefill."""
        return self.encode_s + self.prefill_s + (new - 1) * self.step_s


@dataclass(frozen=True)
class Profile:
    """A plan beside the full cache, from one image to many.

    Attributes
    ----------
    model : str
    new : int
        Tokens answered.
    full, plan : tuple of Phases
        Per number of images.
    """

    model: str
    new: int
    full: tuple[Phases, ...]
    plan: tuple[Phases, ...]

    @property
    def pays_from(self) -> int | None:
        """Fewest images from which on the whole answer comes earlier; None: not within these."""
        found = None
        for full, plan in reversed(list(zip(self.full, self.plan, strict=True))):
            if plan.total(self.new) >= full.total(self.new):
                break
            found = full.images
        return found

    def verdict(self) -> list[str]:
        """What a reader should take home."""
        last, mine = self.full[-1], self.plan[-1]
        lines = []
        saved = last.kv_bytes - mine.kv_bytes
        lines.append(
            f"memory: {100 * mine.kv_bytes / last.kv_bytes:.0f} % of the K/V at {last.images} "
            f"images, {saved / 1e6:.1f} MB less per request"
        )
        if self.pays_from is None:
            lines.append(
                f"time: an answer of {self.new} tokens does not come earlier with up to "
                f"{last.images} images"
            )
        else:
            gain = last.total(self.new) / mine.total(self.new)
            lines.append(
                f"time: pays from {self.pays_from} images on; {gain:.2f} x at {last.images} images "
                f"and {self.new} tokens"
            )
        if last.kv_share < _BOTTLENECK:
            lines.append(
                f"the K/V are {100 * last.kv_share:.0f} % of what a step reads at batch 1: weights "
                "are the bottleneck; what is saved serves longer prompts or more requests at once"
            )
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "pays_from": self.pays_from, "verdict": self.verdict()}


def profile(
    vlm: VLM,
    plan: Plan,
    images: int = 16,
    new: int = 64,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Measure a plan and the full cache in turn, at 1, 2, 4 ... ``images`` images.

    Parameters
    ----------
    images, new : int
        Images of the longest prompt, and tokens answered.
    repeats : int
        Each figure is the median of so many rounds.
    """
    counts = _counts(images)
    measured: dict[str, list[Phases]] = {"full": [], "plan": []}
    measure_phases(vlm, Plan(), 1, 2)  # allocators and lazily made tables
    for count in counts:
        progress(f"{count} images")
        rounds = [
            {name: measure_phases(vlm, each, count, new)
             for name, each in (("full", Plan()), ("plan", plan))}
            for _ in range(repeats)
        ]  # fmt: skip
        for name in measured:
            measured[name].append(_median([found[name] for found in rounds]))
    return Profile(vlm.name, new, tuple(measured["full"]), tuple(measured["plan"]))


def _counts(images: int) -> list[int]:
    counts = [1]
    while counts[-1] < images:
        counts.append(min(2 * counts[-1], images))
    return counts


def measure_phases(vlm: VLM, plan: Plan, images: int, new: int) -> Phases:
    """One prompt of ``images`` made-up images, and ``new`` tokens after it."""
    inputs = _inputs(vlm, images)
    vlm.check_length(inputs["input_ids"].shape[1], new)
    state = vlm.prefill(inputs, plan)
    report = state.report
    steps = []
    for _ in range(max(new - 1, 1)):
        start = _now(vlm)
        vlm.step([state], [int(state.logits.argmax(-1))])
        steps.append(_now(vlm) - start)
    work = report.work
    return Phases(
        plan=str(plan),
        images=images,
        tokens=report.sequences[0].tokens,
        encode_s=state.seconds["encode"],
        prefill_s=state.seconds["first_token"] - state.seconds["encode"],
        step_s=statistics.median(steps),
        kv_bytes=report.kv_bytes,
        weight_bytes=_weights(vlm),
        bytes_by_kind=dict(report.bytes_by_kind),
        prefill_flops=work.prefill.total if work else 0.0,
        step_flops=work.step.total if work else 0.0,
        notes=report.notes,
    )


def _inputs(vlm: VLM, images: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    pictures = [
        Image.fromarray(rng.integers(0, 255, (_SIDE, _SIDE, 3), dtype=np.uint8))
        for _ in range(images)
    ]
    content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": _QUESTION}]
    return vlm.process(vlm.render([{"role": "user", "content": content}]), pictures)


def _weights(vlm: VLM) -> int:
    """Bytes of the decoder layers and the language head."""
    text_model = vlm.family.text_model(vlm.model)
    tensors = [p for layer in vlm.family.layers(text_model) for p in layer.parameters()]
    head = vlm.model.get_output_embeddings()
    tensors += list(head.parameters()) if head is not None else []
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _median(rounds: Sequence[Phases]) -> Phases:
    middle = {
        name: statistics.median(getattr(found, name) for found in rounds)
        for name in ("encode_s", "prefill_s", "step_s")
    }
    return Phases(**{**vars(rounds[0]), **middle})


def _now(vlm: VLM) -> float:
    if vlm.model.device.type == "cuda":
        torch.cuda.synchronize(vlm.model.device)
    return time.perf_counter()
