"""The page's figures as Plotly's plain data; colours that follow the theme are set by the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from conduit_kv.report.results import Results, Row, Sample, is_control, is_full, series_of

__all__ = ["AXES", "curve", "front", "pareto", "retention"]

Figure = dict[str, Any]

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a5bd6", "#b08900",
)  # fmt: skip
"""Told apart by people who see few colours (Okabe and Ito, and two more), on both themes."""
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
_SHOWN = 6
"""Curves that are visible before anybody asks for more."""

AXES: dict[str, tuple[str, str]] = {
    "bytes": ("K/V held, share of the full cache", "%"),
    "first": ("first token, seconds", "s"),
    "token": ("each further token, milliseconds", "ms"),
}
"""What accuracy is held against."""


def curve(rows: Sequence[Row], value: str) -> Figure | None:
    """Accuracy or agreement of one task against the share of the cache that is held.

    Parameters
    ----------
    rows : sequence of dict
        Of one model and task, no control.
    value : {"accuracy", "agreement"}
    """
    series: dict[str, list[Row]] = {}
    for row in rows:
        if not is_full(row["plan"]) and row.get(value) is not None:
            series.setdefault(series_of(row["plan"]), []).append(row)
    if not series:
        return None
    names = list(series)
    methods = [name for name in names if not is_control(name)]
    # Those that stand out are shown first, and chance always, to be held against them.
    best = sorted(methods, key=lambda name: -statistics.fmean(r[value] for r in series[name]))
    visible = {*best[:_SHOWN], *[name for name in names if is_control(name)][:1]}
    traces = []
    for name in [*methods, *(name for name in names if is_control(name))]:
        trace = _series(name, series[name], value)
        trace |= _look(name, methods)
        trace["visible"] = True if name in visible else "legendonly"
        traces.append(trace)
    full = next((row for row in rows if is_full(row["plan"])), None)
    if value == "accuracy":
        level = full["accuracy"] if full else rows[0]["accuracy"] - rows[0]["vs_full"]["mean"]
        traces.append(_level(level, "full cache"))
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": AXES["bytes"][0]}, "tickformat": ".0%", "range": [0, 1.03]},
            "yaxis": {"title": {"text": value}, "range": [-0.02, 1.04], "tickformat": ".0%"},
        },
    }


def _share(row: Row) -> float:
    whole = row.get("full_bytes") or row["kv_bytes"]
    return float(row["kv_bytes"] / whole) if whole else 1.0


def _series(name: str, rows: Sequence[Row], value: str) -> dict[str, Any]:
    ordered = sorted(rows, key=_share)
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [round(_share(row), 4) for row in ordered],
        "y": [round(row[value], 4) for row in ordered],
        "text": [row["plan"] for row in ordered],
        "hovertemplate": "%{text}<br>%{y:.1%} at %{x:.1%} of the bytes<extra></extra>",
    }
    if value == "accuracy":
        up = [round(row["accuracy_high"] - row["accuracy"], 4) for row in ordered]
        down = [round(row["accuracy"] - row["accuracy_low"], 4) for row in ordered]
        trace["error_y"] = {
            "type": "data", "symmetric": False, "array": up, "arrayminus": down,
            "thickness": 1.2, "width": 3,
        }  # fmt: skip
    return trace


def _look(name: str, methods: Sequence[str]) -> dict[str, Any]:
    if name not in methods:
        return {
            "line": {"dash": "dot", "width": 2, "color": "chance"},
            "marker": {"symbol": "circle-open", "size": 8, "color": "chance"},
        }
    number = methods.index(name)
    colour = PALETTE[number % len(PALETTE)]
    dash = ("solid", "dash", "dashdot", "longdash")[number // len(PALETTE) % 4]
    return {
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"color": colour, "size": 8, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
    }


def _level(value: float, name: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [0, 1],
        "y": [value, value],
        "line": {"dash": "dash", "width": 1.5, "color": "ink"},
        "hoverinfo": "skip",
    }


def pareto(entries: Sequence[Any], full: Any | None, axis: str) -> Figure | None:
    """Accuracy of a usage's plans against one cost, and the plans that no other one beats.

    Parameters
    ----------
    entries : sequence of Entry
    full : Entry or None
    axis : str
        A key of :data:`AXES`.
    """
    points = [(x, entry) for entry in entries if (x := _AXIS[axis](entry)) is not None]
    whole = _AXIS[axis](full) if full is not None else None
    if not points:
        return None
    known = [*points, *([(whole, full)] if full is not None and whole is not None else [])]
    best = front([(x, entry.accuracy) for x, entry in known])
    on_front = [known[number] for number in best]
    form, unit = (".1%", "") if axis == "bytes" else (".3~g", " " + AXES[axis][1])
    hover = f"%{{text}}<br>%{{y:.1%}} at %{{x:{form}}}{unit}<extra></extra>"
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "Pareto front",
            "x": [x for x, _ in on_front],
            "y": [entry.accuracy for _, entry in on_front],
            "line": {"shape": "hv", "width": 2, "color": "accent"},
            "hoverinfo": "skip",
        }
    ]
    chosen = {id(entry) for _, entry in on_front}
    groups: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("plans", [p for p in points if not p[1].is_control and id(p[1]) not in chosen],
         {"color": "faint", "size": 9}),
        ("chance", [p for p in points if p[1].is_control and id(p[1]) not in chosen],
         {"color": "chance", "size": 8, "symbol": "circle-open"}),
        ("on the front", [p for p in on_front if p[1] is not full],
         {"color": "accent", "size": 11}),
    ]  # fmt: skip
    if full is not None and whole is not None:
        groups.append(
            ("full cache", [(whole, full)], {"color": "ink", "size": 11, "symbol": "star"})
        )
    for name, mine, marker in groups:
        if mine:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": [x for x, _ in mine],
                    "y": [round(entry.accuracy, 4) for _, entry in mine],
                    "text": [entry.plan for _, entry in mine],
                    "marker": marker,
                    "hovertemplate": hover,
                }
            )
    return {
        "data": data,
        "layout": {
            "xaxis": {"title": {"text": AXES[axis][0]}, "rangemode": "tozero"}
            | ({"tickformat": ".0%"} if axis == "bytes" else {}),
            "yaxis": {"title": {"text": "accuracy"}, "range": [-0.02, 1.04], "tickformat": ".0%"},
        },
    }


_AXIS: dict[str, Callable[[Any], float | None]] = {
    "bytes": lambda entry: round(entry.share, 4),
    "first": lambda entry: entry.first_token_s,
    "token": lambda entry: None if entry.per_token_s is None else 1000 * entry.per_token_s,
}


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which (cost, accuracy) no other point beats: cheapest first, each dearer one is better."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1]))
    chosen: list[int] = []
    for number in order:
        if not chosen or points[number][1] > points[chosen[-1]][1]:
            chosen.append(number)
    return chosen


def retention(samples: Sequence[Sample]) -> Figure | None:
    """Share of the visual tokens that each layer holds: plans by layers, mean over samples."""
    shares: dict[str, list[list[float]]] = {}
    for sample in samples:
        for plan, stages in sample.kept.items():
            last = list(stages.values())[-1] if stages else None
            if last and last["images"]:
                images = [image["share"] for image in last["images"]]
                shares.setdefault(plan, []).append(
                    [statistics.fmean(layer) for layer in zip(*images, strict=True)]
                )
    if not shares:
        return None
    plans = list(shares)
    values = [
        [round(statistics.fmean(layer), 4) for layer in zip(*shares[plan], strict=True)]
        for plan in plans
    ]
    return {
        "data": [
            {
                "type": "heatmap",
                "z": values,
                "y": plans,
                "x": list(range(len(values[0]))),
                "zmin": 0,
                "zmax": 1,
                "colorscale": "retention",
                "colorbar": {"tickformat": ".0%", "thickness": 12, "title": {"text": "held"}},
                "hovertemplate": "%{y}<br>layer %{x}: %{z:.1%} of the visual tokens<extra></extra>",
            }
        ],
        "layout": {
            "xaxis": {"title": {"text": "layer"}},
            "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
            "height": 130 + 26 * len(plans),
        },
    }


def tasks_of(results: Results, model: str) -> list[str]:
    """Tasks in the order of their rows."""
    return list(dict.fromkeys(row["task"] for row in results.of(model)))
