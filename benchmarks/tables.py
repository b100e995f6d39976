"""Write the measured sections of the README and of the docs from result files.

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
        (ROOT / "docs" / "measured.md").write_text(side_by_side(measured["headline"]))
    everything = [*measured["usage"].values(), *measured["headline"].values()]
    if everything:
        found = merged(everything)
        text = between(text, "usage", usage(found))
        (ROOT / "docs" / "usage.md").write_text(every_plan(found))
    readme.write_text(text)
    for name, file, section in (
        ("route", RESULTS / "routing.json", routing),
        ("retrieve", RESULTS / "retrieve.json", retrieve),
        ("hold", RESULTS / "hold_speed.json", packed),
        ("reuse", RESULTS / "reuse.json", reuse),
    ):
        page = ROOT / "docs" / "methods" / f"{name}.md"
        if file.exists():
            page.write_text(between(page.read_text(), name, section(json.loads(file.read_text()))))


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


CONTROLS = {
    "tgv-kv": "text-random:{}(of=visual)",
    "reroute": "reroute:{}(rank=random)",
    "lightkv": "random-reduce:{}",
    "conduit": "random-refresh:{}",
    "retoken": "random-select:{}",
    "kvcapsule": "text-random:{}(of=visual)",
    "windowquant": "random-windows:{}",
}
"""Per system, what chance does with the same amount."""


def guessed(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per task, the full cache's row with another item's images."""
    return {
        row["task"]: row
        for content in results.values()
        for row in content["rows"]
        if row["control"] == "wrong-image" and row["plan"] == "full"
    }


def headline(results: dict[str, dict[str, Any]]) -> str:
    """The seven systems in one table, each beside the full cache and chance."""
    wrong, lines = guessed(results), []
    for sweep, content in results.items():
        rows = [row for row in content["rows"] if row["control"] is None]
        found = {(row["task"], row["plan"]): row for row in rows}
        for row in rows:
            name, _, amount = row["plan"].partition(":")
            chance = CONTROLS.get(name, "").format(amount.partition("(")[0])
            if name != sweep[2:] or row["plan"] == chance:
                continue
            task = row["task"]
            beside = (found.get((task, plan)) for plan in ("full", chance))
            others = [f"{other['accuracy']:.2f}" if other else "-" for other in beside]
            guess = f"{wrong[task]['accuracy']:.2f}" if task in wrong else "-"
            lines.append([f"`{row['plan']}`", task, cell(row), *others, guess])
    file = RESULTS / "retrieve.json"
    if file.exists():
        lines += retrieved(json.loads(file.read_text())["answers"])
    head = ["plan", "task", "accuracy", "full cache", "by chance", "wrong image"]
    return table(head, lines) + "\n\n" + NOTE + " [All baselines](docs/measured.md)."


def retrieved(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """ReToken's lines of the headline: what a question costs is two images' worth of tokens."""
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        here = {row["name"]: row for row in rows if row["task"] == task}
        mine = here["retoken"]
        shown = (here.get(mine["against"]), here.get("random-select"))
        beside = [f"{row['accuracy']:.2f}" if row else "-" for row in shown]
        wrong = here.get("retoken, wrong images")
        guess = f"{wrong['accuracy']:.2f}" if wrong else "-"
        accuracy = within({**mine, "interval": (mine["low"], mine["high"])})
        lines.append([f"`{mine['plan']}`", task, accuracy, *beside, guess])
    return lines


NOTE = (
    "Accuracy with its 95 % interval and n, built-in model, seed 0; `*` where the paired "
    "difference to the full cache excludes 0: `make bench`."
)


def side_by_side(results: dict[str, dict[str, Any]]) -> str:
    """One table per system: its plans, its baselines and the controls on the same items."""
    wrong = guessed(results)
    parts = ["# The seven systems, each beside its baselines", "", NOTE, ""]
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
        shown = [f"{wrong[task]['accuracy']:.2f}" if task in wrong else "-" for task in tasks]
        lines.append(["`full`, wrong image", *shown])
        parts += [title.splitlines()[0].removeprefix("# ") + "\n", table(["plan", *tasks], lines)]
        parts.append("")
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


# -- route and retrieve ---------------------------------------------------------------------------


def routing(found: dict[str, Any]) -> str:
    """Delete and reroute side by side per reduction; then everything at 55 %; then seconds."""
    rows = found["summary"]
    parts = []
    for title, kind in (("what and where", "what+where"), ("how many and left of", "others")):
        lines = []
        for name, row in rows.items():
            if " reroute" not in name or "55 %" in name or kind not in row["kinds"]:
                continue
            mine, theirs = (
                row["kinds"][kind],
                rows[name.replace("reroute", "delete")]["kinds"][kind],
            )
            rank = name.partition(" reroute")[0] + (", FastV's schedule" * ("schedule" in name))
            lines.append(
                [
                    f"{name[-6:]} fewer",
                    rank,
                    within(theirs),
                    within(mine),
                    apart(mine["difference"]),
                ]
            )
        if lines:
            full = rows["full"]["kinds"][kind]
            parts.append(f"**Boards, {title}** (full {within(full)})\n")
            head = ["tokens", "ranking", "delete", "reroute", "reroute - delete"]
            parts.append(table(head, sorted(lines, key=lambda line: line[0])) + "\n")
    lines = [
        [
            f"`{row['plan']}`",
            within(row["kinds"]["all"]),
            apart(row["kinds"]["all"]["against_full"]),
        ]
        for name, row in rows.items()
        if "55 % kept" in name
    ]
    if lines:
        parts.append("**Boards, all kinds, 55 % of the tokens on average**\n")
        parts.append(table(["plan", "accuracy", "against full"], lines) + "\n")
    if found.get("prefill"):
        timed = found["prefill"]
        parts.append(f"**Prefill of {timed['tokens']} tokens, {timed['dtype']}**\n")
        lines = [
            [f"`{plan['plan']}`", f"{plan['flops_of_full']:.2f}", f"{plan['of_full']:.2f}"]
            for plan in timed["plans"].values()
        ]
        parts.append(table(["plan", "FLOPs, x full", "time, x full"], lines) + "\n")
    wrong = rows["full"].get("wrong_image")
    beside = f" With another board's image the full cache has {within(wrong)}." if wrong else ""
    return "\n".join(
        [*parts, f"95 % intervals; differences are paired, by bootstrap.{beside} `make routing`."]
    )


def retrieve(found: dict[str, Any]) -> str:
    """Recall and answers per number of images, beside full attention; turns, time, memory."""
    lines = [
        [
            str(row["images"]),
            row["name"],
            f"{row['recall@1']:.2f} ({row['recall@1_interval'][0]:.2f}-"
            f"{row['recall@1_interval'][1]:.2f})"
            if "recall@1" in row
            else "-",
            within({**row, "interval": (row["low"], row["high"])}),
            ", ".join(f"{kind} {mean:.2f}" for kind, (mean, _) in row["by_kind"].items()),
            f"{apart(row['difference'])} {row['against']}" if "difference" in row else "-",
        ]
        for row in found["answers"]
    ]
    head = ["images", "plan", "Recall@1", "answers", "by kind", "against the best full attention"]
    parts = [table(head, lines) + "\n"] if lines else []
    for row in found["turns"]:
        parts.append(
            f"{row['questions']} questions one after another on {row['images']} images, "
            f"{row['sets']} sets: {row['together'][0]:.2f} ({row['together'][1]:.2f}-"
            f"{row['together'][2]:.2f}, n {row['n']}), each asked alone {row['alone'][0]:.2f}; "
            f"difference {apart(row['difference'])}. By kind, together and alone: "
            + ", ".join(
                f"{kind} {each['together']:.2f} and {each['alone']:.2f} (n {each['n']})"
                for kind, each in row["by_kind"].items()
            )
            + ".\n"
        )
    for row in found["time"]:
        shares = ", ".join(f"{name} {share:.2f} x" for name, share in row["share_of"].items())
        parts.append(
            f"Seconds per question on {row['images']} images: {row['seconds']['retoken']:.2f} for "
            f"ReToken, of others: {shares}.\n"
        )
    for row in found["memory"]:
        parts.append(
            f"Resident per question on {row['images']} images with entries on disk: "
            f"{row['resident'] / 1e6:.1f} MB, {100 * row['share']:.1f} % of the full cache.\n"
        )
    return "\n".join([*parts, "95 % intervals: `make retrieve`."])


def reuse(found: dict[str, Any]) -> str:
    """Selectors by share refreshed, with what they lose; then seconds to the first token."""
    parts = []
    if found.get("rows"):
        lines = [
            [
                f"`{row['plan']}`" if ":" in row["plan"] else row["plan"],
                f"{row['accuracy']:.2f} ({row['accuracy_low']:.2f}-{row['accuracy_high']:.2f}, "
                f"n {row['n']})",
                apart(row["vs_full"]),
                f"{row['kl']:.3f}",
                f"{row['kl_answer']:.3f}",
            ]
            for row in found["rows"]
        ]
        head = ["plan", "accuracy", "against full", "KL of the first token", "KL of the answer"]
        parts.append(table(head, lines) + "\n")
    for entry in found.get("speed", []):
        dtype = entry["dtype"].removeprefix("torch.")
        parts.append(
            f"**First token with {entry['images']} images, {entry['tokens']} tokens, {dtype}**\n"
        )
        lines = [
            [
                name,
                f"{seconds:.2f}",
                f"{entry['faster_than_from_pixels'][name]:.1f}",
                f"{entry['faster_than_from_encoder_outputs'][name]:.1f}",
            ]
            for name, seconds in entry["seconds"].items()
        ]
        head = ["", "seconds", "x faster than from pixels", "x faster than from encoder outputs"]
        parts.append(table(head, lines) + "\n")
        parts.append(f"It runs {100 * entry['flops_share']:.0f} % of the FLOPs.\n")
    return "\n".join([*parts, "Medians, in turn: `make reuse`."])


def packed(found: dict[str, Any]) -> str:
    """Decode attention over packed tokens against the fastest dense path; then whole steps."""
    parts = []
    for entry in found["attention"]:
        parts.append(
            f"**Attention of one token over {entry['visual_tokens']} visual tokens, "
            f"{entry['layers']} layers**\n"
        )
        lines = [
            [
                f"`{name}`" if ":" in name else name,
                f"{1000 * seconds:.0f}",
                f"{entry['time_to_dense'][name]:.2f}",
                f"{entry['times_smaller'][name]:.2f}" if name in entry["times_smaller"] else "1.00",
            ]
            for name, seconds in sorted(entry["median_s"].items(), key=lambda pair: pair[1])
        ]
        head = ["held as", "milliseconds", "x the fastest dense path", "times smaller"]
        parts.append(table(head, lines) + "\n")
    steps = found.get("steps")
    if steps:
        parts.append(f"**A whole step of the built-in model, {steps['tokens']} tokens cached**\n")
        lines = [
            [
                f"`{name}`" if ":" in name else name,
                f"{1000 * seconds:.0f}",
                f"{100 * steps['cache_share_of_a_step'][name]:.0f} %",
                f"{steps['kv_bytes'][name] / 1e6:.0f}" if name in steps["kv_bytes"] else "-",
            ]
            for name, seconds in steps["step_s"].items()
        ]
        head = ["held as", "milliseconds", "of it the cache", "K and V, MB"]
        parts.append(table(head, lines) + "\n")
        parts.append(f"The outlier guard adds {steps['guard_s']:.1f} s to the prefill.\n")
    parts.append(
        f"Dense is bf16. Medians, {found['machine']}, torch {found['torch']}, {found['threads']} "
        "threads: `python benchmarks/hold_speed.py --model`. Where the processor has units for "
        "bf16, dense paths are faster and the ratios larger."
    )
    return "\n".join(parts)


def within(entry: dict[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{entry['accuracy']:.2f} ({low:.2f}-{high:.2f}, n {entry['n']})"


def apart(difference: dict[str, Any]) -> str:
    return f"{difference['mean']:+.2f} ({difference['low']:+.2f} to {difference['high']:+.2f})"


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
