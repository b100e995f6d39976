"""Rows as the bench writes them, made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def row(task: str, plan: str, accuracy: float, full: float, **changes: Any) -> dict[str, Any]:
    """A row of 400 items; a share in the plan's text gives the bytes."""
    share = float(plan.partition(":")[2].partition("(")[0] or 1)
    difference = accuracy - full
    found = {
        "model": "toy",
        "task": task,
        "plan": plan,
        "n": 400,
        "accuracy": accuracy,
        "accuracy_low": max(0.0, accuracy - 0.04),
        "accuracy_high": min(1.0, accuracy + 0.04),
        "agreement": 1 - abs(difference),
        "kept_tokens": 200 * share,
        "total_tokens": 200,
        "kv_bytes": round(1e6 * share),
        "full_bytes": 1_000_000,
        "prefill_s": 0.5,
        "first_token_s": 0.6,
        "per_token_s": 0.05,
        "control": None,
        "protocol": "short",
        "n_images": 1,
        "kept_visual": 190 * share,
        "total_visual": 190,
        "vs_full": {
            "mean": difference,
            "low": difference - 0.02,
            "high": difference + 0.02,
            "verdict": "below" if difference < -0.02 else "not separated",
        },
    }
    return found | changes


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a result file; further names go into its manifest."""

    def make(rows: list[dict[str, Any]], name: str = "out.json", **more: Any) -> Path:
        file = tmp_path / name
        file.write_text(json.dumps({"manifest": {"seed": 0, **more}, "rows": rows}))
        return file

    return make
