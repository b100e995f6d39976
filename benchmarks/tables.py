"""Write the measured sections of the README and of docs/usage.md from result files.

    python benchmarks/tables.py

Every figure in those sections comes from benchmarks/results; none is typed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
USAGES = (
    ("one-shot answers", ("board", "board-sparse")),
    ("late answers", ("board-late", "board-sparse-late", "haystack-8-late")),
    ("long answers", ("board-list", "board-sparse-list")),
    ("follow-up questions", ("board-follow-up", "board-sparse-follow-up", "haystack-8-follow-up")),
)
SHARES = ("0.5", "0.2", "0.1", "0.05")


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    for name, section in (("speed", speed), ("embedded", embedded)):
        file = RESULTS / f"{name}.json"
        if file.exists():
            text = between(text, name, section(json.loads(file.read_text())))
    measured = {"headline": results_in("headline"), "usage": results_in("usage")}
    if measured["headline"]:
        text = between(text, "headline", headline(measured["headline"]))
    everything = [*measured["usage"].values(), *measured["headline"].values()]
    if everything:
        found = merged(everything)
        text = between(text, "usage", usage(found))
        (ROOT / "docs" / "usage.md").write_text(every_plan(found))
    readme.write_text(text)


def results_in(folder: str) -> dict[str, dict[str, Any]]:
    """Results by the name of the sweep that they are of."""
    files = sorted((RESULTS / folder).glob("*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of several: of a plan that is in more than one, the row with most items."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in (row for found in results for row in found["rows"]):
        key = (row["task"], row["plan"], row["control"])
        if key not in rows or rows[key]["n"] < row["n"]:
            rows[key] = row
    return {"manifest": results[0]["manifest"], "rows": list(rows.values())}


def headline(results: dict[str, dict[str, Any]]) -> str:
    """One table per system: its plans, its baselines and the controls on the same items."""
    guessed = {
        row["task"]: row
        for content in results.values()
        for row in content["rows"]
        if row["control"] == "wrong-image" and row["plan"] == "full"
    }
    parts = []
    for name, content in results.items():
        rows = [row for row in content["rows"] if row["control"] is None]
        title = (ROOT / "benchmarks" / "headline" / f"{name}.yaml").read_text()
        if not rows or all(row["plan"] == "full" for row in rows):
            continue
        tasks = list(dict.fromkeys(row["task"] for row in rows))
        by_plan: dict[str, dict[str, dict[str, Any]]] = {}
        for row in rows:
            by_plan.setdefault(row["plan"], {})[row["task"]] = row
        lines = [
            [f"`{plan}`", *(cell(of[task]) if task in of else "-" for task in tasks)]
            for plan, of in by_plan.items()
        ]
        wrong = [guessed.get(task) for task in tasks]
        lines.append(
            ["`full`, wrong image", *(f"{r['accuracy']:.2f}" if r else "-" for r in wrong)]
        )
        parts += [title.splitlines()[0].removeprefix("# ") + "\n", table(["plan", *tasks], lines)]
        parts.append("")
    parts.append(
        "Accuracy with its 95 % interval and n, built-in model, seed 0; `*` where the paired "
        "difference to the full cache excludes 0: `make bench`."
    )
    return "\n".join(parts)


def between(text: str, name: str, section: str) -> str:
    """``text`` with ``section`` between the markers called ``name``."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    return re.sub(pattern, lambda m: m[1] + section.strip() + "\n" + m[2], text, flags=re.S)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


# -- usage ----------------------------------------------------------------------------------------


def usage(found: dict[str, Any]) -> str:
    """Mean accuracy per usage for the best plans at each share, beside full and random."""
    rows = [row for row in found["rows"] if row["control"] is None]
    parts = []
    for title, tasks in USAGES:
        here = [row for row in rows if row["task"] in tasks]
        known = sorted({row["task"] for row in here}, key=tasks.index)
        if not known:
            continue
        full = {row["task"]: row for row in here if row["plan"] == "full"}
        by_plan: dict[str, dict[str, dict[str, Any]]] = {}
        for row in here:
            by_plan.setdefault(row["plan"], {})[row["task"]] = row
        complete = {p: r for p, r in by_plan.items() if len(r) == len(known)}
        largest = max(sum(r["n"] for r in rows_of.values()) for rows_of in complete.values())
        lines = []
        for share in SHARES:
            mine = {p: r for p, r in complete.items() if f":{share}(" in p}
            sure = {p: r for p, r in mine.items() if sum(x["n"] for x in r.values()) == largest}
            ranked = sorted(sure or mine, key=lambda p: -mean(mine[p]))
            for plan in ranked[:3]:
                cells = [cell(mine[plan][task]) for task in known]
                lines.append([share, f"`{plan}`", f"{mean(mine[plan]):.2f}", *cells])
        if not lines:
            continue
        head = ["kept", "plan", "mean", *known]
        first = ["1.0", "`full`", f"{mean(full):.2f}" if full else "-"]
        first += [cell(full[task]) if task in full else "-" for task in known]
        parts.append(f"**{title.capitalize()}** (the three best at each share)\n")
        parts.append(table(head, [first, *lines]) + "\n")
    manifest = found["manifest"]
    note = (
        "Accuracy with its 95 % interval and n; `*` where the paired difference to the full cache "
        "excludes 0. The share is of the visual tokens, all text is kept (`of=visual`). The model "
        f"is the built-in one, seed {manifest.get('seed', 0)}. "
        "[All plans, the wrong-image control and the differences](docs/usage.md)."
    )
    return "\n".join([*parts, note])


def mean(rows: dict[str, dict[str, Any]]) -> float:
    return sum(row["accuracy"] for row in rows.values()) / max(len(rows), 1)


def cell(row: dict[str, Any]) -> str:
    star = "*" if row["vs_full"]["verdict"] in ("above", "below") else ""
    return (
        f"{row['accuracy']:.2f}{star} ({row['accuracy_low']:.2f}-{row['accuracy_high']:.2f}, "
        f"n {row['n']})"
    )


def every_plan(found: dict[str, Any]) -> str:
    """All rows, task by task."""
    parts = [
        "# Every plan on every task",
        "",
        "Written by `python benchmarks/tables.py` from benchmarks/results. Accuracy "
        "with Wilson's 95 % interval; the difference to the full cache on the same items with its "
        "paired bootstrap interval; the share of answers equal to the full cache's.",
        "",
    ]
    for name, text in found["manifest"].get("protocols", {}).items():
        parts.append(f"- **{name}**: {text}.")
    for task in dict.fromkeys(row["task"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["task"] == task]
        parts += ["", f"## {task}", ""]
        lines = []
        for row in sorted(rows, key=lambda r: (r["control"] or "", r["plan"] != "full", r["plan"])):
            versus = row["vs_full"]
            lines.append(
                [
                    f"`{row['plan']}`" + (f" ({row['control']})" if row["control"] else ""),
                    str(row["n"]),
                    f"{row['accuracy']:.3f} ({row['accuracy_low']:.3f}-{row['accuracy_high']:.3f})",
                    f"{versus['mean']:+.3f} ({versus['low']:+.3f} to {versus['high']:+.3f})",
                    "-" if row["agreement"] is None else f"{row['agreement']:.2f}",
                    f"{row['kept_visual']:.1f} of {row['total_visual']:.0f}",
                    f"{row['kv_bytes'] / 1e6:.2f} MB",
                ]
            )
        head = ["plan", "n", "accuracy", "against full", "agreement", "visual kept", "K/V"]
        parts.append(table(head, lines))
    return "\n".join(parts) + "\n"


# -- speed ----------------------------------------------------------------------------------------


def speed(found: dict[str, Any]) -> str:
    parts = []
    for entry in found.get("prefill", []):
        parts.append(f"**Prefill of {entry['tokens']} tokens, {entry['dtype']}**\n")
        parts.append(
            table(
                ["", "seconds", "x plain Transformers (SDPA), encoder taken out"],
                [
                    [name, f"{value:.2f}", ratio(entry, name)]
                    for name, value in entry["seconds"].items()
                ],
            )
            + "\n"
        )
    for entry in found.get("memory", []):
        parts.append(f"**Peak memory of that prefill, {entry['dtype']}**\n")
        parts.append(
            table(
                ["", "MB", "x plain"],
                [
                    [name, f"{peak['peak_mb']:.0f}", f"{entry['ratio_to_plain'][name]:.2f}"]
                    for name, peak in entry["peaks"].items()
                ],
            )
            + "\n"
        )
    for entry in found.get("decode", []):
        parts.append(f"**A token more with {entry['cached']} cached, {entry['dtype']}**\n")
        parts.append(
            table(
                ["", "milliseconds", "x plain `generate`", "x empty cache"],
                [
                    [
                        name,
                        f"{1000 * value:.1f}",
                        f"{entry['ratio_to_plain'][name]:.2f}",
                        f"{entry['ratio_to_empty'][name]:.2f}",
                    ]
                    for name, value in entry["seconds_per_token"].items()
                ],
            )
            + "\n"
        )
    manifest = found["manifest"]
    parts.append(
        f"Medians of {manifest['repeats']} rounds in turn, torch {manifest['torch']}, Transformers "
        f"{manifest['transformers']}, {manifest['threads']} threads: `make speed`."
    )
    return "\n".join(parts)


def ratio(entry: dict[str, Any], name: str) -> str:
    value = entry["ratio_to_plain"].get(name)
    return "-" if value is None else f"{value:.2f}"


# -- the embedded model ---------------------------------------------------------------------------


def embedded(found: dict[str, Any]) -> str:
    wrong = {row["task"]: row for row in found["rows"] if row["image"] == "wrong"}
    lines = []
    for row in found["rows"]:
        if row["image"] != "right":
            continue
        other = wrong.get(row["task"], {})
        low, high = row["accuracy_low"], row["accuracy_high"]
        lines.append(_line(row["task"], row["n"], row["accuracy"], low, high, other))
        for kind, part in row.get("kinds", {}).items():
            beside = other.get("kinds", {}).get(kind, {})
            name = f"{row['task']}, {kind}"
            lines.append(_line(name, part["n"], part["accuracy"], *part["interval"], beside))
    head = ["held-out task", "n", "accuracy (95 %)", "with the wrong image"]
    note = "Greedy answers of the built-in model: `python benchmarks/embedded.py`."
    return table(head, lines) + "\n\n" + note


def _line(
    name: str, n: int, accuracy: float, low: float, high: float, wrong: dict[str, Any]
) -> list[str]:
    beside = f"{wrong['accuracy']:.3f}" if wrong else "-"
    return [name, str(n), f"{accuracy:.3f} ({low:.3f}-{high:.3f})", beside]


if __name__ == "__main__":
    main()
