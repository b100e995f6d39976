"""Published tables as files: what is run, with which models, and what the paper found.

A file has ``paper``, ``published``, and ``models``, ``plans`` and ``budgets`` as a sweep has;
``lmms`` names tasks of lmms-eval, ``tasks`` those of the bench. ``dry`` is a sweep over the same
plans (or plans of its own) that runs anywhere in a minute.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conduit_kv.bench.sweep import Sweep, plans_of, read_yaml, slug, sweep_of
from conduit_kv.errors import InputError
from conduit_kv.plan import Plan

__all__ = ["Paper", "commands", "read_paper"]


@dataclass(frozen=True)
class Paper:
    """A published table.

    Attributes
    ----------
    title, link, table : str
    published : tuple of dict
        Its figures, as far as they are printed beside ours: model, task, plan, value.
    lmms : tuple of str
        Tasks of lmms-eval.
    batch_size : int
    sweep : Sweep
        Models, plans and the bench's own tasks.
    dry : Sweep
        The same plans, small.
    """

    title: str
    link: str
    table: str
    published: tuple[dict[str, Any], ...]
    lmms: tuple[str, ...]
    batch_size: int
    sweep: Sweep
    dry: Sweep

    @property
    def plans(self) -> tuple[Plan, ...]:
        return plans_of(self.sweep.plans, self.sweep.budgets)


def read_paper(file: Path) -> Paper:
    """Read a table's file.

    Raises
    ------
    InputError
        If something is missing or of the wrong kind; plans are read by :attr:`Paper.plans`.
    """
    found = read_yaml(file)
    paper = found.pop("paper", None)
    if not isinstance(paper, dict) or not {"title", "link", "table"} <= set(paper):
        raise InputError(f"{file}: paper must have title, link and table")
    published = found.pop("published", [])
    if not all(isinstance(each, dict) and {"plan", "value"} <= set(each) for each in published):
        raise InputError(f"{file}: each published figure has plan and value")
    lmms = tuple(str(name) for name in found.pop("lmms", []))
    batch_size = int(found.pop("batch_size", 1))
    dry = found.pop("dry", None)
    sweep = sweep_of(found, str(file))
    if not isinstance(dry, dict):
        raise InputError(f"{file}: dry says what a small run asks, as in `dry: {{tasks: [board]}}`")
    if not lmms and not sweep.tasks:
        raise InputError(f"{file}: name tasks, or lmms tasks of lmms-eval")
    small: dict[str, Any] = {"n": 2, "timed": 0, "samples": 0}
    if "plans" not in dry:
        small |= {"plans": list(sweep.plans), "budgets": list(sweep.budgets)}
    small |= dry
    return Paper(
        title=str(paper["title"]),
        link=str(paper["link"]),
        table=str(paper["table"]),
        published=tuple(published),
        lmms=lmms,
        batch_size=batch_size,
        sweep=sweep,
        dry=sweep_of(small, f"{file}, dry"),
    )


def commands(paper: Paper, out: Path, limit: int | None = None) -> list[list[str]]:
    """What runs the table's lmms-eval part: one command per model and plan.

    Parameters
    ----------
    paper : Paper
    out : Path
        A folder per model and plan is made in it.
    limit : int, optional
        Documents per task.
    """
    if not paper.lmms:
        return []
    found = []
    for model in paper.sweep.models:
        for plan in paper.plans:
            arguments = [f"pretrained={model}", f'plan="{plan}"']
            folder = out / slug(model) / slug(str(plan))
            arguments.append(f"log={folder / 'answers.jsonl'}")
            if paper.sweep.device:
                arguments.append(f"device={paper.sweep.device}")
            if paper.sweep.dtype:
                arguments.append(f"dtype={paper.sweep.dtype}")
            command = [
                sys.executable, "-m", "lmms_eval", "--model", "conduit_kv",
                "--model_args", ",".join(arguments), "--tasks", ",".join(paper.lmms),
                "--batch_size", str(paper.batch_size), "--output_path", str(folder),
                "--log_samples",
            ]  # fmt: skip
            found.append(command + (["--limit", str(limit)] if limit else []))
    return found


def run_commands(found: Sequence[Sequence[str]]) -> None:
    """Run them one after the other.

    Raises
    ------
    InputError
        If one fails; those before it have left their results.
    """
    for command in found:
        folder = Path(command[command.index("--output_path") + 1])
        if any(folder.rglob("*results.json")):
            continue  # done before: the same command goes on
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise InputError(f"lmms-eval ended with {done.returncode}: {' '.join(command)}")
