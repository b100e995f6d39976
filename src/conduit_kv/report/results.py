"""Bench results from files: rows, what they depend on, and samples to look at."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conduit_kv.bench.record import items_path
from conduit_kv.bench.rows import ENDINGS, read_rows
from conduit_kv.errors import InputError, PlanError
from conduit_kv.plan import Plan

__all__ = ["Results", "Sample", "full_accuracy", "is_control", "is_full", "load", "series_of"]

Row = dict[str, Any]
_NEEDED = ("model", "task", "plan", "n", "accuracy", "accuracy_low", "accuracy_high", "vs_full")


@dataclass(frozen=True)
class Sample:
    """One item, with what plans left of it and answered.

    Attributes
    ----------
    model, task, item, question, answer : str
    first : (str, str) or None
        Question and answer of the turn before.
    images : tuple of str
        ``data:`` addresses.
    kept : dict
        Plan to stage to what :func:`conduit_kv.bench.samples.plain` gives.
    answers : dict
        Plan to its answer and score; ``full`` among them.
    """

    model: str
    task: str
    item: str
    question: str
    answer: str
    first: tuple[str, str] | None
    images: tuple[str, ...]
    kept: dict[str, dict[str, Any]]
    answers: dict[str, tuple[str, float]]


@dataclass(frozen=True)
class Results:
    """What was measured.

    Attributes
    ----------
    rows : tuple of dict
        As the bench writes them.
    manifests : tuple of (str, dict)
        File and what its rows depend on.
    samples : tuple of Sample
    """

    rows: tuple[Row, ...]
    manifests: tuple[tuple[str, dict[str, Any]], ...]
    samples: tuple[Sample, ...]

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(row["model"] for row in self.rows))

    def of(self, model: str, control: str | None = None) -> list[Row]:
        """Rows of a model: plain ones, or those of a control."""
        return [row for row in self.rows if row["model"] == model and row.get("control") == control]


def load(paths: Sequence[Path]) -> Results:
    """Read results: files that ``conduit-kv bench`` wrote, or folders of its ``.json`` files.

    Of rows of the same model, task, plan and control the one with more items is taken.

    Raises
    ------
    InputError
        If a file is missing, is no result of the bench, or nothing was found.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    manifests: list[tuple[str, dict[str, Any]]] = []
    samples: dict[tuple[str, str, str], Sample] = {}
    for file in _files(paths):
        found = _read(file)
        manifests.append((file.name, found["manifest"]))
        for row in found["rows"]:
            key = (row["model"], row["task"], row["plan"], row.get("control"))
            if key not in rows or rows[key]["n"] < row["n"]:
                rows[key] = row
        if items_path(file).exists() and found["rows"]:
            for sample in _samples(items_path(file), found["rows"][0]["model"]):
                samples.setdefault((sample.model, sample.task, sample.item), sample)
    if not rows:
        raise InputError("no results: name a file that `conduit-kv bench --json FILE` wrote")
    return Results(tuple(rows.values()), tuple(manifests), tuple(samples.values()))


def _files(paths: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            # Other results (speed, the embedded model) lie beside the bench's.
            files += [file for file in sorted(path.glob("*.json")) if _is_bench(file)]
        elif path.exists():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file")
    return list(dict.fromkeys(files))


def _is_bench(file: Path) -> bool:
    try:
        _read(file)
    except InputError:
        return False
    return True


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.suffix in ENDINGS:
            found = {"manifest": {}, "rows": read_rows(file)}
        else:
            found = json.loads(file.read_text(encoding="utf-8"))
        complete = isinstance(found["manifest"], dict) and all(
            key in row for row in found["rows"] for key in _NEEDED
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} cannot be read as results of the bench: {error}") from None
    if not complete:
        raise InputError(f"{file} is no result of the bench: its rows lack {', '.join(_NEEDED)}")
    return dict(found)


def _samples(path: Path, model: str) -> list[Sample]:
    looked: dict[tuple[str, str, str], dict[str, Any]] = {}
    answers: dict[tuple[str, str, str], dict[str, tuple[str, float]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the line that a killed run cut off
        if "looked" in entry:
            key = (entry["task"], entry["looked"], entry["digest"])
            if key in looked:
                looked[key]["kept"] |= entry["kept"]
            else:
                looked[key] = entry
        elif "plans" in entry and entry["control"] is None:
            key = (entry["task"], entry["item"], entry["digest"])
            answers.setdefault(key, {}).update(
                {plan: (found["text"], found["score"]) for plan, found in entry["plans"].items()}
            )
    return [
        Sample(
            model,
            task,
            item,
            entry["question"],
            entry["answer"],
            tuple(entry["first"]) if entry["first"] else None,
            tuple(entry["images"]),
            entry["kept"],
            answers.get((task, item, digest), {}),
        )
        for (task, item, digest), entry in looked.items()
    ]


def is_full(plan: str) -> bool:
    """Whether a plan keeps everything."""
    try:
        return Plan.parse(plan).is_identity
    except PlanError:  # a method of another version
        return plan == "full"


def is_control(plan: str) -> bool:
    """Whether a plan chooses by chance."""
    return re.search(r"\brandom\b", plan) is not None


def series_of(plan: str) -> str:
    """A plan without its budgets: those that differ in them alone are one curve."""
    return re.sub(r":[0-9.]+(e-?[0-9]+)?[A-Za-z]*", "", plan)


def full_accuracy(row: Row) -> float:
    """What the full cache scores on the row's items."""
    return float(row["accuracy"] - row["vs_full"]["mean"])
