"""Results item by item on disk, so that a run that was stopped goes on where it was.

Beside ``FILE.json`` lies ``FILE.items.jsonl``. Its first line says what the results depend on;
each further line is what some plans answered to one item, what was timed, or what was kept of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from conduit_kv.bench.protocols import Outcome
from conduit_kv.errors import InputError

__all__ = ["OnChange", "Record", "items_path", "write_json"]

OnChange = Literal["stop", "restart", "keep"]
Key = tuple[str, str | None, str]
"""Task, control and item."""


def items_path(file: Path) -> Path:
    """Where the items of ``file`` are kept."""
    if file.suffix == ".json":
        return file.with_suffix(".items.jsonl")
    return Path(f"{file}.items.jsonl")


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write ``file`` in one piece: never half of it."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, file)


class Record:
    """What is known of every item, in memory and, if a file was named, on disk.

    Parameters
    ----------
    file : Path or None
        The results' file; None keeps nothing on disk.
    identity : dict
        What answers depend on (see :func:`conduit_kv.bench.manifest.identity`).
    on_change : {"stop", "restart", "keep"}
        What to do with results of another identity: raise, forget them, or keep them and say so.

    Attributes
    ----------
    mixed : list of str
        What differs between kept results and this run.

    Raises
    ------
    InputError
        If results on disk were made under another identity, or cannot be read.
    """

    def __init__(
        self, file: Path | None, identity: dict[str, Any], on_change: OnChange = "stop"
    ) -> None:
        self.mixed: list[str] = []
        self._outcomes: dict[Key, dict[str, tuple[Outcome, float]]] = {}
        self._digests: dict[Key, str] = {}
        self._seconds: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._looked: set[tuple[str, str, str, str]] = set()
        self._path = items_path(file) if file is not None else None
        self._identity = identity
        if file is None or self._path is None:
            return
        if on_change == "restart":
            self._path.unlink(missing_ok=True)
        elif not self._path.exists() and file.exists():
            raise InputError(
                f"{file} exists, but {self._path.name}, from which it would go on, does not: name "
                "another file, or start over with --on-change restart"
            )
        if self._path.exists() and self._path.stat().st_size:
            self._read(file, on_change)
        else:
            self._append({"identity": identity})

    def __len__(self) -> int:
        return len(self._outcomes)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this process goes on with the items; two would each do the work of both.

        Raises
        ------
        InputError
            If another process does.
        """
        if self._path is None:
            yield
            return
        lock = FileLock(f"{self._path}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InputError(
                f"another run is going on with {self._path}: wait for it, or name another file"
            ) from None
        try:
            yield
        finally:
            lock.release()
            Path(lock.lock_file).unlink(missing_ok=True)

    def missing(
        self, task: str, control: str | None, item: str, digest: str, plans: list[str]
    ) -> list[str]:
        """Those of ``plans`` that have not answered this very item yet."""
        key = (task, control, item)
        if self._digests.get(key, digest) != digest:
            del self._outcomes[key]  # the item has changed under its name
            del self._digests[key]
        known = self._outcomes.get(key, {})
        return [plan for plan in plans if plan not in known]

    def add(
        self,
        task: str,
        control: str | None,
        item: str,
        digest: str,
        results: dict[str, tuple[Outcome, float]],
    ) -> None:
        """Keep what some plans answered to an item, with scores."""
        self._put((task, control, item), digest, results)
        self._append(
            {
                "task": task,
                "control": control,
                "item": item,
                "digest": digest,
                "plans": {
                    plan: {**asdict(outcome), "score": score}
                    for plan, (outcome, score) in results.items()
                },
            }
        )

    def get(
        self, task: str, control: str | None, item: str, plan: str
    ) -> tuple[Outcome, float] | None:
        """A plan's outcome and score on an item, if it is known."""
        return self._outcomes.get((task, control, item), {}).get(plan)

    def seconds(self, task: str, plan: str, machine: dict[str, Any]) -> list[dict[str, Any]]:
        """What was timed of a plan on this machine."""
        timed = self._seconds.get((task, plan), [])
        return [entry for entry in timed if entry["machine"] == machine]

    def add_seconds(
        self, task: str, plan: str, item: str, seconds: dict[str, Any], machine: dict[str, Any]
    ) -> None:
        """Keep what was timed."""
        entry = {"item": item, "seconds": seconds, "machine": machine}
        self._seconds.setdefault((task, plan), []).append(entry)
        self._append({"task": task, "timed": plan, **entry})

    def looked(self, task: str, item: str, digest: str, plan: str) -> bool:
        """Whether it is known what a plan keeps of this very item."""
        return (task, item, digest, plan) in self._looked

    def add_look(
        self,
        task: str,
        item: str,
        digest: str,
        shown: dict[str, Any],
        kept: dict[str, dict[str, Any]],
    ) -> None:
        """Keep what some plans keep of an item, to be looked at.

        Parameters
        ----------
        shown : dict
            Question, right answer and images.
        kept : dict
            Plan to stage to what :func:`conduit_kv.bench.samples.plain` gives.
        """
        entry = {"task": task, "looked": item, "digest": digest, **shown, "kept": kept}
        self._take(entry)
        self._append(entry)

    def _put(self, key: Key, digest: str, results: dict[str, tuple[Outcome, float]]) -> None:
        if self._digests.get(key, digest) != digest:
            self._outcomes.pop(key, None)
        self._digests[key] = digest
        self._outcomes.setdefault(key, {}).update(results)

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _read(self, file: Path, on_change: OnChange) -> None:
        path: Path = self._path  # type: ignore[assignment]
        lines = path.read_text(encoding="utf-8").split("\n")
        whole, rest = lines[:-1], lines[-1]
        try:
            entries = [json.loads(line) for line in whole]
            before = [entry["identity"] for entry in entries if "identity" in entry]
            if not before or "identity" not in entries[0]:
                raise ValueError("its first line says nothing of what it depends on")
            for entry in entries:
                self._take(entry)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} cannot be read ({error}): name another file, or start over with "
                "--on-change restart"
            ) from None
        if rest:  # a line that was cut off when the run was killed
            path.write_text("".join(line + "\n" for line in whole), encoding="utf-8")
        for old in before:
            self.mixed += [d for d in _differences(old, self._identity) if d not in self.mixed]
        if self.mixed and on_change == "stop":
            raise InputError(
                f"{file} was begun under other conditions ({'; '.join(self.mixed)}): go on as it "
                "was begun, name another file, or say --on-change restart (forget it) or keep "
                "(mix, and say so in the manifest)"
            )
        if before[-1] != self._identity:
            self._append({"identity": self._identity})

    def _take(self, entry: dict[str, Any]) -> None:
        if "looked" in entry:
            known = (entry["task"], entry["looked"], entry["digest"])
            self._looked.update((*known, plan) for plan in entry["kept"])
        elif "timed" in entry:
            mine = {key: entry[key] for key in ("item", "seconds", "machine")}
            self._seconds.setdefault((entry["task"], entry["timed"]), []).append(mine)
        elif "plans" in entry:
            results = {}
            for plan, values in entry["plans"].items():
                score = values.pop("score")
                results[plan] = (Outcome(**values), score)
            self._put((entry["task"], entry["control"], entry["item"]), entry["digest"], results)


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """Where two identities differ, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for key in sorted({*old, *new}):
            found += _differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
        return found
    return [] if old == new else [f"{name} was {_short(old)}, is {_short(new)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:12] + "..."
