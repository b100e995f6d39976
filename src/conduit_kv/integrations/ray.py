"""A run's items asked by the machines of a Ray cluster, through Ray Data.

Ray hands each item to an actor with the model and restarts actors that die, so that an item in the
hands of a lost machine is asked again. The process that started the run writes, as always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from conduit_kv.bench.protocols import Outcome
from conduit_kv.bench.run import Answers, Settings, Unit
from conduit_kv.errors import InputError
from conduit_kv.extras import need

if TYPE_CHECKING:
    from conduit_kv.bench.parallel import Source

__all__ = ["RayCluster"]


class RayCluster:
    """Who asks the items of a run: actors of a Ray cluster.

    Parameters
    ----------
    source : Source
        Every machine must be able to load it.
    settings : Settings
    workers : int
        Actors, each with its own copy of the model.
    address : str
        Of the cluster, ``"auto"``, or ``"local"`` for one on this machine.

    Raises
    ------
    InputError
        When run: if the extra ``ray`` is not installed, or the cluster cannot be reached.
    """

    def __init__(self, source: Source, settings: Settings, workers: int, address: str) -> None:
        if workers < 1:
            raise InputError(f"{workers} workers: take at least one")
        self.source = source
        self.settings = settings
        self.workers = workers
        self.address = address

    def __call__(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Answers]]:
        if not units:
            return
        ray = need("ray", "ray", "--ray")
        data = need("ray.data", "ray", "--ray")
        if not ray.is_initialized():
            try:
                ray.init(address=self.address, log_to_driver=False)
            except ConnectionError as error:
                raise InputError(f"no Ray cluster at {self.address}: {error}") from None
        gpus = 1 if (self.source.device or "").startswith("cuda") else 0
        # One item per block: what a lost actor held is one item.
        items = data.from_items([_plain(unit) for unit in units], override_num_blocks=len(units))
        answered = items.map(
            _Worker,
            fn_constructor_args=(self.source, self.settings),
            concurrency=self.workers,
            num_gpus=gpus,
        )
        for row in answered.iter_rows():
            unit = Unit(int(row["part"]), int(row["number"]), tuple(row["plans"]))
            yield unit, _answers(unit, row)


class _Worker:
    """An actor: loads the model once and answers items."""

    def __init__(self, source: Source, settings: Settings) -> None:
        self.bench = source.bench(settings)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        unit = Unit(int(row["part"]), int(row["number"]), tuple(row["plans"]))
        found = self.bench.answer(unit)
        return {
            **_plain(unit),
            "outcomes": [asdict(found[plan][0]) for plan in unit.plans],
            "scores": [found[plan][1] for plan in unit.plans],
        }


def _plain(unit: Unit) -> dict[str, Any]:
    return {"part": unit.part, "number": unit.number, "plans": list(unit.plans)}


def _answers(unit: Unit, row: dict[str, Any]) -> Answers:
    return {
        plan: (Outcome(**outcome), float(score))
        for plan, outcome, score in zip(unit.plans, row["outcomes"], row["scores"], strict=True)
    }
