"""Ask tasks' items under plans, and make rows of what comes back."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from conduit_kv.bench.manifest import identity, machine
from conduit_kv.bench.protocols import PROTOCOLS, Outcome, answer, measure, prompt_of
from conduit_kv.bench.record import OnChange, Record, write_json
from conduit_kv.bench.samples import look, plain, thumbnail
from conduit_kv.bench.stats import agreement, compare, wilson
from conduit_kv.errors import InputError
from conduit_kv.picture import center_crop, seen
from conduit_kv.plan import Plan
from conduit_kv.tasks import Item, Task, get_task

if TYPE_CHECKING:
    from conduit_kv.engine.vlm import VLM

__all__ = [
    "CONTROLS",
    "Answers",
    "Bench",
    "Control",
    "Crew",
    "Settings",
    "Unit",
    "with_random",
]

Control = Literal["wrong-image", "random"]
CONTROLS: dict[str, str] = {
    "wrong-image": "rows in which each item shows the images of another one",
    "random": "for each evict plan, text-random with the same budget",
}
"""The controls, in words."""

FULL = "full"
_LOOK_AHEAD = 32
"""Items drawn beyond the last one, among which a wrong image is looked for."""


@dataclass(frozen=True)
class Settings:
    """What a run asks.

    Parameters
    ----------
    tasks : tuple of str
    plans : tuple of Plan
        One row per task and plan; those that do nothing are run once, as ``full``.
    n : int
        Items per task.
    seed : int
        Of the items.
    controls : tuple of str
        Keys of :data:`CONTROLS`.
    against : Plan or None
        Rows are compared with this plan too, which is run besides if it is not among them.
    timed : int
        Items on which each plan is timed alone at batch 1; 0 leaves the seconds out.
    samples : int
        Items of each task of which is kept what each plan keeps, layer by layer.

    Raises
    ------
    InputError
        If something is missing, twice there or unknown.
    """

    tasks: tuple[str, ...]
    plans: tuple[Plan, ...]
    n: int = 100
    seed: int = 0
    controls: tuple[str, ...] = ()
    against: Plan | None = None
    timed: int = 3
    samples: int = 0

    def __post_init__(self) -> None:
        if not self.tasks or not self.plans:
            raise InputError("name at least one task and one plan")
        if self.n < 1:
            raise InputError(f"n is {self.n}: ask at least one item")
        if self.timed < 0:
            raise InputError(f"timed is {self.timed}: it cannot be negative")
        if self.samples < 0:
            raise InputError(f"samples is {self.samples}: it cannot be negative")
        for control in self.controls:
            if control not in CONTROLS:
                raise InputError(f"unknown control {control!r}: known are {', '.join(CONTROLS)}")
        for task in self.tasks:
            get_task(task)
        object.__setattr__(self, "tasks", tuple(dict.fromkeys(self.tasks)))
        plans = with_random(self.plans) if "random" in self.controls else self.plans
        object.__setattr__(self, "plans", tuple(dict.fromkeys(plans)))


def with_random(plans: Sequence[Plan]) -> list[Plan]:
    """Add the random control of each evict plan: the same budget, text kept, the rest by chance."""
    from conduit_kv.methods.evict import TextRandom

    added = list(plans)
    for plan in plans:
        method = plan.evict
        if method is None or method.is_identity:
            continue
        control = TextRandom(budget=method.budget, of=method.of, per=method.per)
        added.append(Plan(tuple(control if m is method else m for m in plan)))
    return added


@dataclass(frozen=True)
class _Part:
    """One task under one control: items with the images that they show."""

    task: Task
    control: str | None
    items: tuple[Item, ...]
    shown: tuple[Item, ...]

    def images(self, number: int) -> tuple[Image.Image, ...]:
        return self.shown[number].images

    def digest(self, number: int) -> str:
        """What was asked, so that an item that changes under its name is asked again."""
        item = self.items[number]
        content = [
            self.task.protocol,
            item.question,
            item.answer,
            item.first,
            item.max_new_tokens,
            self.shown[number].image_keys,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Unit:
    """What is asked in one go: an item, by its part of the run, under the plans that lack it."""

    part: int
    number: int
    plans: tuple[str, ...]


Answers = dict[str, tuple[Outcome, float]]
"""Plan to what it answered, with its score."""
Crew = Callable[[Sequence[Unit]], Iterator[tuple[Unit, Answers]]]
"""What answers units in some order: other processes, other machines."""


class Bench:
    """A run over tasks and plans that can be stopped and gone on with.

    Parameters
    ----------
    vlm : VLM
    settings : Settings
    file : Path, optional
        Where the results go; beside it the items are kept as they come.
    on_change : {"stop", "restart", "keep"}
        See :class:`conduit_kv.bench.record.Record`.

    Raises
    ------
    InputError
        If results of other conditions are in the way.
    """

    def __init__(
        self,
        vlm: VLM,
        settings: Settings,
        file: Path | None = None,
        on_change: OnChange = "stop",
    ) -> None:
        self.vlm = vlm
        self.settings = settings
        self.file = file
        self.identity = identity(vlm, settings.seed)
        self.machine = machine(vlm)
        self.record = Record(file, self.identity, on_change)
        self._parts = list(self._make_parts())
        wanted = [*settings.plans, *([settings.against] if settings.against else [])]
        # Full is always run: agreement and differences are with it.
        self._plans: dict[str, Plan] = {FULL: Plan()}
        self._plans.update({_key(plan): plan for plan in wanted if _key(plan) != FULL})

    @property
    def steps(self) -> int:
        """Items, looks and timings of the whole run."""
        items = sum(len(part.items) for part in self._parts)
        timed, looks = (
            min(k, self.settings.n) for k in (self.settings.timed, self.settings.samples)
        )
        return items + (timed * len(self._plans) + looks) * len(self.settings.tasks)

    def run(
        self, progress: Callable[[str], None] = lambda _: None, crew: Crew | None = None
    ) -> dict[str, Any]:
        """Ask everything that is not known yet; gives what :meth:`results` gives.

        On any error, Ctrl-C included, what is known until then is written first.

        Parameters
        ----------
        progress : callable
            Called with a task's name after each step of :attr:`steps`.
        crew : callable, optional
            Who asks the items, in place of this process. Seconds are measured here, when all is
            asked, so that nothing runs beside.
        """
        started = time.time()
        with self.record.alone():
            try:
                self._ask(progress, crew)
                for part in self._parts:
                    if part.control is None:
                        self._look(part, progress)
                        self._time(part, progress)
            except BaseException:
                if self.record:
                    self._write(started, complete=False)
                raise
            return self._write(started, complete=True)

    def results(self) -> dict[str, Any]:
        """``{"manifest": ..., "rows": [...]}`` of what is known now."""
        return {"manifest": self._manifest(), "rows": list(self._rows())}

    def answers(self, plan: Plan) -> list[tuple[Outcome, float]]:
        """What a plan answered, with scores: all items of all tasks, controls aside."""
        found = [
            self._known(part, number, _key(plan))
            for part in self._parts
            if part.control is None
            for number in range(len(part.items))
        ]
        return [entry for entry in found if entry is not None]

    # -- asking --------------------------------------------------------------------------------

    def _make_parts(self) -> Iterator[_Part]:
        n, seed = self.settings.n, self.settings.seed
        for name in self.settings.tasks:
            task = get_task(name)
            items = tuple(task.items(n, seed))
            yield _Part(task, None, items, items)
            if "wrong-image" in self.settings.controls:
                yield _Part(task, "wrong-image", items, _others(task, items, seed))

    def _ask(self, progress: Callable[[str], None], crew: Crew | None) -> None:
        units = []
        for index, part in enumerate(self._parts):
            for number, item in enumerate(part.items):
                missing = self.record.missing(
                    part.task.name, part.control, item.id, part.digest(number), list(self._plans)
                )
                if missing:
                    units.append(Unit(index, number, tuple(missing)))
                else:
                    progress(part.task.name)
        answered = crew(units) if crew else ((unit, self.answer(unit)) for unit in units)
        for unit, results in answered:
            part = self._parts[unit.part]
            item, digest = part.items[unit.number], part.digest(unit.number)
            self.record.add(part.task.name, part.control, item.id, digest, results)
            progress(part.task.name)

    def answer(self, unit: Unit) -> Answers:
        """Ask one item under some plans; nothing is kept."""
        part = self._parts[unit.part]
        item = part.items[unit.number]
        prompt = prompt_of(self.vlm, item, part.task.protocol, part.images(unit.number))
        outcomes = answer(self.vlm, prompt, [self._plans[plan] for plan in unit.plans])
        return {
            plan: (outcome, part.task.score(outcome.text, item))
            for plan, outcome in zip(unit.plans, outcomes, strict=True)
        }

    def _look(self, part: _Part, progress: Callable[[str], None]) -> None:
        task = part.task
        for number, item in enumerate(part.items[: self.settings.samples]):
            digest = part.digest(number)
            missing = [
                plan
                for plan in self._plans
                if plan != FULL and not self.record.looked(task.name, item.id, digest, plan)
            ]
            if missing:
                images = part.images(number)
                prompt = prompt_of(self.vlm, item, task.protocol, images)
                found = look(self.vlm, prompt, [self._plans[plan] for plan in missing])
                shown = {
                    "question": item.question,
                    "answer": item.answer,
                    "first": item.first,
                    "images": [thumbnail(seen(image, center_crop(self.vlm))) for image in images],
                }
                kept = {
                    plan: {stage: plain(kept) for stage, kept in stages.items()}
                    for plan, stages in zip(missing, found, strict=True)
                }
                self.record.add_look(task.name, item.id, digest, shown, kept)
            progress(task.name)

    def _time(self, part: _Part, progress: Callable[[str], None]) -> None:
        task, warm = part.task, False
        for number, item in enumerate(part.items[: self.settings.timed]):
            prompt = None
            for plan in self._plans:
                known = self.record.seconds(task.name, plan, self.machine)
                if item.id not in [entry["item"] for entry in known]:
                    prompt = prompt or prompt_of(self.vlm, item, task.protocol, part.images(number))
                    if not warm:  # allocators and lazily made tables
                        measure(self.vlm, replace(prompt, max_new_tokens=2), Plan())
                        warm = True
                    seconds = measure(self.vlm, prompt, self._plans[plan])
                    self.record.add_seconds(task.name, plan, item.id, vars(seconds), self.machine)
                progress(task.name)

    # -- what is made of it --------------------------------------------------------------------

    def _write(self, started: float, *, complete: bool) -> dict[str, Any]:
        results = self.results()
        results["manifest"] |= {
            "complete": complete,
            "started": _utc(started),
            "finished": _utc(time.time()),
        }
        if self.file is not None:
            write_json(self.file, results)
        return results

    def _manifest(self) -> dict[str, Any]:
        settings = self.settings
        protocols = {get_task(name).protocol for name in settings.tasks}
        manifest = {
            **self.identity,
            "machine": self.machine,
            "n": settings.n,
            "tasks": {name: get_task(name).protocol for name in settings.tasks},
            "protocols": {name: PROTOCOLS[name] for name in sorted(protocols)},
            "plans": [str(plan) for plan in settings.plans],
            "controls": {name: CONTROLS[name] for name in settings.controls},
            "against": None if settings.against is None else str(settings.against),
            "decoding": "greedy, all plans of an item as one batch",
            "intervals": (
                "accuracy: Wilson, 95 %; differences: paired bootstrap over items, 95 %; tie: both "
                "plans within one point of the full cache"
            ),
            "tokens_and_bytes": "mean over items, after the eviction on which the answer rests",
            "seconds": (
                f"median over the first {settings.timed} items, each plan alone at batch 1; "
                "first_token_s counts from processed inputs, prefill_s leaves out the image encoder"
            ),
        }
        if self.record.mixed:
            manifest["mixed"] = self.record.mixed
        return manifest

    def _rows(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            for plan in self.settings.plans:
                row = self._row(part, plan)
                if row is not None:
                    yield row

    def _row(self, part: _Part, plan: Plan) -> dict[str, Any] | None:
        against = self.settings.against
        wanted = [_key(plan), FULL] + ([_key(against)] if against else [])
        answered = [
            found
            for number in range(len(part.items))
            if all(found := [self._known(part, number, key) for key in wanted])
        ]
        results = [[entry for entry in found if entry is not None] for found in answered]
        if not results:
            return None
        mine, full = ([found[i] for found in results] for i in (0, 1))
        outcomes, scores = [outcome for outcome, _ in mine], [score for _, score in mine]
        full_scores = [score for _, score in full]
        n, accuracy = len(mine), statistics.fmean(scores)
        low, high = wilson(accuracy, n)
        row: dict[str, Any] = {
            "model": self.vlm.name,
            "task": part.task.name,
            "plan": str(plan),
            "n": n,
            "accuracy": accuracy,
            "accuracy_low": low,
            "accuracy_high": high,
            "agreement": agreement([o.text for o in outcomes], [o.text for o, _ in full]),
            "kept_tokens": statistics.fmean(o.kept for o in outcomes),
            "total_tokens": statistics.fmean(o.total for o in outcomes),
            "kv_bytes": round(statistics.fmean(o.kv_bytes for o in outcomes)),
            **self._row_seconds(part.task.name, plan),
            "control": part.control,
            "protocol": part.task.protocol,
            "seed": self.settings.seed,
            "n_images": max(len(item.sources) for item in part.items),
            "kept_visual": statistics.fmean(o.kept_visual for o in outcomes),
            "total_visual": statistics.fmean(o.total_visual for o in outcomes),
            "full_bytes": round(statistics.fmean(o.full_bytes for o in outcomes)),
            "active_visual": statistics.fmean(o.active_visual for o in outcomes),
            "prefill_flops": statistics.fmean(o.prefill_flops for o in outcomes),
            "full_flops": statistics.fmean(o.full_flops for o in outcomes),
        }
        row["vs_full"] = vars(compare(scores, full_scores))
        if against is not None:
            theirs = [found[2][1] for found in results]
            row["against"] = str(against)
            row["vs_against"] = vars(compare(scores, theirs, full_scores))
        return row

    def _known(self, part: _Part, number: int, plan: str) -> tuple[Outcome, float] | None:
        return self.record.get(part.task.name, part.control, part.items[number].id, plan)

    def _row_seconds(self, task: str, plan: Plan) -> dict[str, Any]:
        timed = self.record.seconds(task, _key(plan), self.machine)
        found = {}
        for name in ("encode", "prefill", "first_token", "per_token"):
            values = [entry["seconds"][name] for entry in timed]
            values = [value for value in values if value is not None]
            found[f"{name}_s"] = statistics.median(values) if values else None
        return {
            "prefill_s": found["prefill_s"],
            "first_token_s": found["first_token_s"],
            "per_token_s": found["per_token_s"],
            "encode_s": found["encode_s"],
            "timed": len(timed),
        }


def _key(plan: Plan) -> str:
    """The name under which a plan's results are kept: all that do nothing share one."""
    return FULL if plan.is_identity else str(plan)


def _others(task: Task, items: Sequence[Item], seed: int) -> tuple[Item, ...]:
    """For each item, the next one that shows other images."""
    try:
        ahead = task.items(len(items) + _LOOK_AHEAD, seed)
    except InputError:  # there are no more: go round
        ahead = [*items, *items]
    chosen = []
    for number, item in enumerate(items):
        keys = item.image_keys
        others = [
            other
            for other in ahead[number + 1 : number + 1 + _LOOK_AHEAD]
            if len(other.sources) == len(item.sources)
            and not any(a == b for a, b in zip(keys, other.image_keys, strict=True))
        ]
        if not others:
            raise InputError(f"{task.name}: no item with other images to show for {item.id}")
        chosen.append(others[0])
    return tuple(chosen)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
