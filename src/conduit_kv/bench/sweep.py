"""A sweep: models x tasks x plans x budgets, from a file or the command line."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conduit_kv.bench.run import Settings
from conduit_kv.errors import InputError, PlanError
from conduit_kv.extras import need
from conduit_kv.plan import Plan

__all__ = ["Sweep", "plans_of", "read_sweep", "slug"]

DEFAULT_PLANS = ("full", "tgv-kv:0.5", "tgv-kv:0.2", "tgv-kv:0.1", "tgv-kv:0.05")


@dataclass(frozen=True)
class Sweep:
    """What is to be measured.

    Parameters
    ----------
    models : tuple of str
    tasks : tuple of str
    plans : tuple of str
        Where a text has ``{}``, each of ``budgets`` is put.
    budgets : tuple of str
    n, seed, timed, samples : int
        See :class:`conduit_kv.bench.run.Settings`.
    controls : tuple of str
    against : str or None
    dtype, device : str or None
    workers : int
    """

    models: tuple[str, ...] = ("embedded",)
    tasks: tuple[str, ...] = ()
    plans: tuple[str, ...] = DEFAULT_PLANS
    budgets: tuple[str, ...] = ()
    n: int = 100
    seed: int = 0
    controls: tuple[str, ...] = ()
    against: str | None = None
    timed: int = 3
    samples: int = 2
    dtype: str | None = None
    device: str | None = None
    workers: int = 1

    def settings(self) -> Settings:
        """What each model is asked.

        Raises
        ------
        InputError, PlanError
            If a task or plan cannot be read.
        """
        return Settings(
            tasks=self.tasks,
            plans=plans_of(self.plans, self.budgets),
            n=self.n,
            seed=self.seed,
            controls=self.controls,
            against=None if self.against is None else Plan.of(self.against),
            timed=self.timed,
            samples=self.samples,
        )

    def replace(self, **changes: Any) -> Sweep:
        """A copy with those of ``changes`` that are not None."""
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, **given)


def plans_of(texts: Sequence[str], budgets: Sequence[str] = ()) -> tuple[Plan, ...]:
    """Plans from their texts, each ``{}`` filled with every budget.

    Raises
    ------
    PlanError
        If a text has ``{}`` and there are no budgets, or there are budgets and no ``{}``.
    """
    if budgets and not any("{}" in text for text in texts):
        raise PlanError(
            f"budgets {', '.join(budgets)} are for plans with {{}}, as in 'tgv-kv:{{}}'; none has"
        )
    plans = []
    for text in texts:
        if "{}" not in text:
            plans.append(Plan.of(text))
        elif not budgets:
            raise PlanError(f"{text!r} has {{}} but there are no budgets to put there")
        else:
            plans += [Plan.of(text.replace("{}", budget)) for budget in budgets]
    return tuple(plans)


def read_sweep(file: Path) -> Sweep:
    """Read a sweep from YAML.

    Raises
    ------
    InputError
        If the file cannot be read, has a key that no sweep has, or a value of the wrong kind.
    """
    return sweep_of(read_yaml(file), str(file))


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds."""
    yaml = need("yaml", "bench", "a sweep from a file")
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise InputError(f"{file}: write names and values, such as `tasks: [board]`")
    return {str(key): value for key, value in found.items()}


def sweep_of(found: dict[str, Any], where: str) -> Sweep:
    """A sweep from plain data; ``where`` is named in errors."""
    fields = {field.name: field for field in dataclasses.fields(Sweep)}
    values: dict[str, Any] = {}
    for key, value in found.items():
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"known are {', '.join(fields)}"
            raise InputError(f"{where}: {key!r} is no part of a sweep: {remedy}")
        kind = str(fields[key].type)
        if kind.startswith("tuple"):
            many = value if isinstance(value, list) else [value]
            values[key] = tuple(_text(each, key, where) for each in many)
        elif kind == "int":
            if not isinstance(value, int) or isinstance(value, bool):
                raise InputError(f"{where}: {key} is a whole number, not {value!r}")
            values[key] = value
        else:
            values[key] = None if value is None else _text(value, key, where)
    return Sweep(**values)


def _text(value: Any, key: str, where: str) -> str:
    if isinstance(value, dict | list) or value is None:
        raise InputError(f"{where}: {key} holds text and numbers, not {value!r}")
    return str(value)


def slug(model: str) -> str:
    """A file's name for a model."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", model.strip("/.~")).strip("-") or "model"
