"""A page with the forecast of memory and FLOPs over the number of visual tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conduit_kv.errors import InputError
from conduit_kv.report.figures import PALETTE
from conduit_kv.report.page import embedded, render, size_text

if TYPE_CHECKING:
    from conduit_kv.bench.forecast import Forecast, Shape
    from conduit_kv.plan import Plan

__all__ = ["write_forecast"]

_PLOTS = (
    ("K/V after the prefill, GB", "kv", 1e9),
    ("prefill, TFLOP of the decoder layers", "prefill", 1e12),
    ("bytes that a decoding step reads, GB", "read", 1e9),
)


def write_forecast(
    found: Sequence[tuple[Shape, Sequence[Forecast]]], plan: Plan, file: Path
) -> Path:
    """Write the page.

    Raises
    ------
    InputError
        If the extra ``bench`` is not installed, or the file cannot be written.
    """
    text = render(
        "forecast.html.j2",
        "the page",
        plan=str(plan),
        found=found,
        plots=[title for title, _, _ in _PLOTS],
        data=embedded({"plots": [_plot(found, name, unit) for _, name, unit in _PLOTS]}),
        size=size_text,
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"the page cannot be written to {file}: {error}") from None
    return file


def _plot(
    found: Sequence[tuple[Shape, Sequence[Forecast]]], name: str, unit: float
) -> list[dict[str, Any]]:
    """Traces: each model in its colour, full as a line and the plan dashed."""
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": f"{shape.name}, {which}",
            "x": [row.visual for row in rows],
            "y": [getattr(row, f"{name}_{which}") / unit for row in rows],
            "line": {"color": PALETTE[number % len(PALETTE)], "dash": dash, "width": 2},
            "hovertemplate": "%{y:.3~g} at %{x:,} visual tokens<extra>%{fullData.name}</extra>",
        }
        for number, (shape, rows) in enumerate(found)
        for which, dash in (("full", "solid"), ("plan", "dash"))
    ]
