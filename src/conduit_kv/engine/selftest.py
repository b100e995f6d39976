"""Is Conduit right on this very model? Checked in seconds, before it is trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from PIL import Image

from conduit_kv.methods.base import registry
from conduit_kv.methods.evict.base import EvictMethod

if TYPE_CHECKING:
    from conduit_kv.engine.vlm import VLM

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


def run_selftest(vlm: VLM) -> SelfTest:
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
        error = float((logits - plain).abs().max() / plain.abs().max().clamp(min=1e-6))
        checks.append(
            Check(f"{plan} equals plain Transformers", error <= tolerance, f"error {error:.1e}")
        )
    half = vlm.prefill(inputs, "text-random:0.5").logits.float()
    same = float((half - plain).abs().max()) == 0 or torch.isfinite(half).all()
    checks.append(Check("an evicted prompt gives finite logits", bool(same), "text-random:0.5"))
    checks.append(_needle(vlm))
    return SelfTest(tuple(checks))


def _needle(vlm: VLM) -> Check:
    """Text that is kept must be found again when most of the image is gone."""
    picture = Image.new("RGB", (64, 48), "white")
    question = f"The code is {_NEEDLE}. What is the code? Answer with the code."
    full = vlm.ask(question, [picture], max_new_tokens=8)
    kept = vlm.ask(question, [picture], "text-random:0.5(of=visual)", max_new_tokens=8)
    passed = (_NEEDLE in kept.text) or (_NEEDLE not in full.text)
    return Check("needle", passed, f"full {full.text!r}, half of the image {kept.text!r}")
