"""The page: everything it needs is in the file."""

from __future__ import annotations

import json
import statistics
from importlib import resources
from pathlib import Path
from typing import Any

import conduit_kv
from conduit_kv.errors import InputError
from conduit_kv.extras import need
from conduit_kv.report import figures
from conduit_kv.report.advice import MARGINS, USAGES, Advice, advise
from conduit_kv.report.results import Results, Row, is_control, is_full, series_of

__all__ = ["embedded", "page", "size_text", "write_page"]

_FEW = 100
"""Items below which the page says that they are few."""
_SAMPLES = 24
_SIGNS = {"above": "↑", "below": "↓", "tie": "=", "not separated": "·"}
_MINUS = "\N{MINUS SIGN}"


def write_page(
    results: Results, file: Path, *, margin: float = 0.05, title: str = "What a KV cache can lose"
) -> Path:
    """Write the report.

    Parameters
    ----------
    results : Results
    file : Path
    margin : float
        Loss of accuracy that a recommended plan may have.
    title : str

    Raises
    ------
    InputError
        If the extra ``bench`` is not installed, or the file cannot be written.
    """
    text = page(results, margin=margin, title=title)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"the report cannot be written to {file}: {error}") from None
    return file


def page(results: Results, *, margin: float = 0.05, title: str = "What a KV cache can lose") -> str:
    """The report as HTML."""
    advices = {model: advise(results, model, margin) for model in results.models}
    return render(
        "page.html.j2",
        "the report",
        title=title,
        subtitle=_subtitle(results),
        notes=_notes(results),
        models=results.models,
        margin=margin,
        margins=sorted({*MARGINS, margin}),
        few=_FEW,
        advices=advices,
        missing={model: _missing(advices[model]) for model in results.models},
        tables={model: _tables(results, model) for model in results.models},
        manifests=[(name, _plain(manifest)) for name, manifest in results.manifests],
        signs=_SIGNS,
        percent=_percent,
        points=_points,
        seconds=_seconds,
        size=size_text,
        version=conduit_kv.__version__,
        js=_read("page.js"),
        data=embedded(_data(results, advices)),
    )


def render(template: str, what: str, **values: Any) -> str:
    """A page from its template, with the style and plotly in it; ``what`` it is, for messages."""
    jinja = need("jinja2", "bench", what)
    plotly = need("plotly.offline", "bench", what)
    environment = jinja.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page: str = environment.from_string(_read(template)).render(
        css=_read("page.css"), plotly=plotly.get_plotlyjs(), **values
    )
    return page


def _read(name: str) -> str:
    return resources.files("conduit_kv.report").joinpath(name).read_text(encoding="utf-8")


def embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the element in which it stands."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _data(results: Results, advices: dict[str, list[Advice]]) -> dict[str, Any]:
    curves: dict[str, Any] = {}
    pareto: dict[str, Any] = {}
    retention: dict[str, Any] = {}
    for model in results.models:
        rows = results.of(model)
        tasks = figures.tasks_of(results, model)
        curves[model] = {
            task: {
                value: figures.curve([row for row in rows if row["task"] == task], value)
                for value in ("accuracy", "agreement")
            }
            for task in tasks
        }
        pareto[model] = {
            advice.usage.name: {
                "title": advice.usage.title,
                **{
                    axis: figures.pareto(advice.entries, advice.full, axis) for axis in figures.AXES
                },
            }
            for advice in advices[model]
        }
        samples = [sample for sample in results.samples if sample.model == model]
        found = {
            task: figures.retention([sample for sample in samples if sample.task == task])
            for task in dict.fromkeys(sample.task for sample in samples)
        }
        retention[model] = {task: figure for task, figure in found.items() if figure}
    return {
        "models": results.models,
        "curves": curves,
        "pareto": pareto,
        "retention": retention,
        "samples": [vars(sample) for sample in _chosen(results)],
    }


def _chosen(results: Results) -> list[Any]:
    """Samples for the page: of every task the first ones, as many of each as there is room for."""
    of_task: dict[tuple[str, str], list[Any]] = {}
    for sample in results.samples:
        of_task.setdefault((sample.model, sample.task), []).append(sample)
    each = max(1, _SAMPLES // max(len(of_task), 1))
    return [sample for samples in of_task.values() for sample in samples[:each]]


def _tables(results: Results, model: str) -> dict[str, list[Row]]:
    """Per task all rows: the full cache, plans by series and budget, then controls."""
    found: dict[str, list[Row]] = {}
    for row in results.rows:
        if row["model"] == model:
            kind = "control" if row.get("control") or is_control(row["plan"]) else ""
            kind = "full" if is_full(row["plan"]) and not row.get("control") else kind
            found.setdefault(row["task"], []).append({**row, "kind": kind})
    order = {"full": 0, "": 1, "control": 2}
    for rows in found.values():
        best = {
            name: statistics.fmean(r["accuracy"] for r in rows if series_of(r["plan"]) == name)
            for name in {series_of(row["plan"]) for row in rows}
        }
        rows.sort(
            key=lambda row: (
                order[row["kind"]],
                row.get("control") or "",
                -best[series_of(row["plan"])],
                series_of(row["plan"]),
                -row["kv_bytes"],
            )
        )
    return found


def _subtitle(results: Results) -> str:
    counts = sorted({row["n"] for row in results.rows})
    items = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    tasks = len({row["task"] for row in results.rows})
    plans = len({row["plan"] for row in results.rows})
    models = " and ".join(results.models)
    return (
        f"{plans} plans on {tasks} {'task' if tasks == 1 else 'tasks'}, {items} items each; "
        f"model {models}."
    )


def _notes(results: Results) -> list[str]:
    notes = []
    few = max(row["n"] for row in results.rows)
    if few < _FEW:
        notes.append(
            f"Only {few} items per task: intervals are wide, the figures show directions at most."
        )
    for name, manifest in results.manifests:
        if manifest.get("mixed"):
            notes.append(f"{name} mixes conditions: {'; '.join(manifest['mixed'])}.")
        if manifest.get("complete") is False:
            notes.append(f"{name} was stopped before it was complete.")
    return notes


def _missing(advices: list[Advice]) -> list[str]:
    known = {advice.usage.name for advice in advices}
    return [usage.title.lower() for usage in USAGES if usage.name not in known]


def _plain(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """A manifest as names and text, nested ones joined."""
    found = []
    for key, value in manifest.items():
        if isinstance(value, dict):
            text = "; ".join(f"{name}: {inner}" for name, inner in value.items())
        elif isinstance(value, list):
            text = ", ".join(str(each) for each in value)
        else:
            text = str(value)
        found.append((key.replace("_", " "), text))
    return found


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    value = 100 * share
    return f"{value:.1f} %" if 0 < value < 9.95 else f"{value:.0f} %"


def _points(difference: float) -> str:
    value = 100 * difference
    text = f"{abs(value):.1f}".removesuffix(".0")
    if text == "0":
        return "0"
    return ("+" if value > 0 else _MINUS) + text


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size_text(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
