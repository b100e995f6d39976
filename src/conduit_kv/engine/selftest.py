"""Is Conduit right on this very model? Checked in seconds, before it is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from conduit_kv.engine.runner import Runner
from conduit_kv.engine.session import Session
from conduit_kv.methods.base import registry
from conduit_kv.methods.evict.base import EvictMethod
from conduit_kv.plan import Plan

_NEEDLE = "7391"


@dataclass(frozen=True)
class Check:
    """One check: what it was, whether it held, and the figure behind it."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class SelfTest:
    """The outcome of all checks."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks held."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        return "\n".join(
            f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}"
            for check in self.checks
        )


def run_selftest(vlm: Runner) -> SelfTest:
    """Contract 1 (identity is plain Transformers) and a needle prompt, on the model itself."""
    picture = Image.new("RGB", (64, 48), "white")
    picture.paste("red", (8, 8, 32, 24))
    message = {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": f"The code is {_NEEDLE}. What is the code?"},
        ],
    }
    inputs = vlm.process(vlm.render([message]), [picture])
    with torch.inference_mode():
        plain = vlm.model(**inputs, logits_to_keep=1).logits[:, -1].float()
    tolerance = 1e-4 if vlm.model.dtype == torch.float32 else 0.05
    checks = []
    names = sorted(n for n, m in registry().items() if issubclass(m, EvictMethod))
    for name in names:
        plan = name if name == "full" else f"{name}:1.0"
        logits = vlm.prefill(inputs, plan).logits.float()
        error = _error(logits, plain)
        checks.append(
            Check(f"{plan} equals plain Transformers", error <= tolerance, f"error {error:.1e}")
        )
    checks.append(_masked(vlm, inputs, tolerance))
    checks.append(_needle(vlm))
    return SelfTest(tuple(checks))


def _masked(vlm: Runner, inputs: Mapping[str, Any], tolerance: float) -> Check:
    """A token decoded on an evicted cache is one that cannot see what was evicted."""
    half = inputs["input_ids"].shape[1] // 2
    plan = f"streaming-llm:{half}"  # keeps the same tokens in every layer: one mask says it
    state = vlm.prefill(inputs, plan)
    layers = [n for n, layer in enumerate(state.cache) if layer.kind == "full"]
    if len(layers) < len(state.cache):
        return Check(f"{plan} equals a masked forward", True, "not checked: layers with a window")
    kept, token = state.cache.held(layers[0]), int(state.logits.argmax(-1))
    tokens = len(state.ids) + 1
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    visible[-1, :-1] = False
    visible[-1, kept] = True
    vlm.step([state], [token])
    positions = state.cache.progress.position_ids(0)[:, None]
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"].new_tensor([[token]])], dim=1)
    arguments = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
    if "mm_token_type_ids" in arguments:
        types = arguments["mm_token_type_ids"]
        arguments["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(types[:, :1])], dim=1)
    hidden = torch.zeros(1, 1, tokens, tokens, dtype=vlm.model.dtype)
    hidden.masked_fill_(~visible, torch.finfo(vlm.model.dtype).min)
    with torch.inference_mode():
        plain = vlm.model(
            input_ids=ids,
            attention_mask=hidden.to(ids.device),
            position_ids=(positions if positions.shape[0] > 1 else positions[0]).to(ids.device),
            logits_to_keep=1,
            **arguments,
        ).logits[:, -1]
    error = _error(state.logits, plain)
    passed = error <= tolerance and len(kept) == half
    detail = f"error {error:.1e}, {len(kept)} of {tokens - 1} tokens held"
    return Check(f"{plan} equals a masked forward", passed, detail)


def _error(ours: Tensor, plain: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    ours, plain = ours.float(), plain.float()
    return float((ours - plain).abs().max() / plain.abs().max().clamp(min=1e-6))


def _needle(vlm: Runner) -> Check:
    """Text that is kept must be found again in a later turn, when half of the image is gone."""
    picture = Image.new("RGB", (64, 48), "white")
    answers = []
    for plan in ("full", "text-random:0.5(of=visual)"):
        session = Session(vlm, Plan.of(plan))
        session.ask(f"The code is {_NEEDLE}. Say yes.", [picture], max_new_tokens=4)
        answers.append(session.ask("What is the code?", max_new_tokens=12).text)
    full, kept = answers
    if _NEEDLE not in full:
        return Check("needle", True, f"says nothing: the full cache answers {full!r}")
    return Check("needle", _NEEDLE in kept, f"full {full!r}, half of the image {kept!r}")
