"""A run's items asked by several processes of this machine.

One process writes: a worker that dies loses the item in its hands, which is asked again.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnContext
from typing import TYPE_CHECKING, Any

from conduit_kv.bench.run import Answers, Bench, Settings, Unit
from conduit_kv.errors import ConduitError, InputError

if TYPE_CHECKING:
    from conduit_kv.engine.vlm import VLM

__all__ = ["Processes", "Source"]

_TRIES = 3
"""How often workers are started again without any item answered in between."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from, so that each worker can load its own.

    Parameters
    ----------
    model : str
    device : str or None
        Or several, joined by commas, which workers take in turn.
    dtype : str
    threads : int or None
        CPU threads of each worker.
    """

    model: str
    device: str | None = None
    dtype: str = "auto"
    threads: int | None = None

    def load(self) -> VLM:
        """Load it, without what Transformers says meanwhile; of several devices, on the first.

        Raises
        ------
        InputError, ModelError
            If it cannot be loaded there.
        """
        import torch
        from transformers.utils import logging

        from conduit_kv.engine.load import load

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        device = (self.device or "").split(",")[0].strip() or None
        try:
            return load(self.model, device=device, dtype=self.dtype)
        except RuntimeError as error:
            if isinstance(error, ConduitError):
                raise
            raise InputError(
                f"{self.model} cannot be loaded on {device or 'this device'}: {error}"
            ) from None

    def bench(self, settings: Settings) -> Bench:
        """A bench that answers units and keeps nothing."""
        return Bench(self.load(), settings)


class Processes:
    """Workers on this machine, each with its own copy of the model.

    Parameters
    ----------
    source : Source
    settings : Settings
        Of the run.
    workers : int

    Raises
    ------
    InputError
        When run: if workers die again and again.
    """

    def __init__(self, source: Source, settings: Settings, workers: int) -> None:
        if workers < 1:
            raise InputError(f"{workers} workers: take at least one")
        self.source = source
        self.settings = settings
        self.workers = workers

    def __call__(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Answers]]:
        left = list(units)
        tries = 0
        while left:
            answered = 0
            try:
                for unit, answers in self._ask(left):
                    left.remove(unit)
                    answered += 1
                    yield unit, answers
            except BrokenProcessPool:
                tries = 0 if answered else tries + 1
                if tries == _TRIES:
                    raise InputError(
                        f"workers died {_TRIES} times before they answered anything (out of "
                        f"memory?): take fewer than {self.workers} workers"
                    ) from None

    def _ask(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, Answers]]:
        context = multiprocessing.get_context("spawn")
        count = min(self.workers, len(units))
        pool = ProcessPoolExecutor(
            count, context, _begin, (self._sources(context, count), self.settings)
        )
        waiting: dict[Future[Answers], Unit] = {}
        coming = iter(units)
        try:
            # Two in hand per worker, so that none waits and little is lost.
            for unit in itertools.islice(coming, 2 * count):
                waiting[pool.submit(_answer, unit)] = unit
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    unit = waiting.pop(future)
                    answers = future.result()
                    for following in itertools.islice(coming, 1):
                        waiting[pool.submit(_answer, following)] = following
                    yield unit, answers
        finally:
            pool.shutdown(cancel_futures=True)

    def _sources(self, context: SpawnContext, count: int) -> Any:
        devices = (self.source.device or "").split(",")
        queue = context.SimpleQueue()
        for number in range(count):
            device = devices[number % len(devices)].strip() or None
            queue.put(replace(self.source, device=device))
        return queue


_worker: tuple[Source, Settings] | None = None
"""In a worker: what it answers with."""


def _begin(sources: Any, settings: Settings) -> None:
    global _worker
    # Ctrl-C is the writing process's business; workers end with their pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _worker = sources.get(), settings


@functools.cache
def _bench() -> Bench:
    # Loaded with the first unit, so that what goes wrong is that unit's error and is seen.
    if _worker is None:
        raise InputError("units are answered in a pool's workers only")
    source, settings = _worker
    return source.bench(settings)


def _answer(unit: Unit) -> Answers:
    return _bench().answer(unit)
