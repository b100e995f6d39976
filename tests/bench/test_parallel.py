"""Workers answer as this process does, and one that dies loses nothing."""

import multiprocessing
import sys
from pathlib import Path

import pytest

from conduit_kv.bench.parallel import Processes
from conduit_kv.bench.run import Bench, Settings, Unit
from conduit_kv.errors import InputError, ModelError
from conduit_kv.plan import Plan
from tests.bench.workers import Tiny
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A tiny model in a folder, from which each worker loads it."""
    folder = tmp_path_factory.mktemp("tiny")
    model, processor = tiny_model("llava")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Tiny(str(folder), "cpu", "float32", 1)


@pytest.fixture(autouse=True)
def no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers begin without the tests' shim, and this model needs no torchvision."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "torchvision" not in path])


SETTINGS = Settings(("board-late",), (Plan.of("full"), Plan.of("tgv-kv:0.5")), 5, timed=0)


def test_workers_give_the_same_rows_and_a_dead_one_loses_nothing(
    source: Tiny, tmp_path: Path
) -> None:
    vlm = source.load()
    alone = Bench(vlm, SETTINGS).run()
    seen: list[str] = []

    def kill_once(task: str) -> None:
        seen.append(task)
        if len(seen) == 2:
            for child in multiprocessing.active_children():
                child.kill()

    bench = Bench(vlm, SETTINGS, tmp_path / "out.json")
    found = bench.run(kill_once, Processes(source, SETTINGS, 1))
    assert found["rows"] == alone["rows"]
    assert len(seen) == bench.steps == 5
    asked = Bench(vlm, SETTINGS, tmp_path / "out.json")
    assert len(asked.record) == 5


def test_units_and_their_answers(source: Tiny) -> None:
    """Whatever the order in which workers come back, an answer belongs to its unit."""
    units = [Unit(0, number, ("full", "tgv-kv:0.5")) for number in range(4)]
    bench = source.bench(SETTINGS)
    found = dict(Processes(source, SETTINGS, 2)(units))
    assert found == {unit: bench.answer(unit) for unit in units}


def test_workers_that_cannot_load_say_so(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    with pytest.raises(InputError, match="at least one"):
        Processes(Tiny("x"), SETTINGS, 0)
    with pytest.raises(ModelError, match="no such folder"):
        list(Processes(Tiny(nowhere), SETTINGS, 1)([Unit(0, 0, ("full",))]))
    with pytest.raises(InputError, match="workers died 3 times"):
        list(Processes(Tiny("x", dies=nowhere), SETTINGS, 1)([Unit(0, 0, ("full",))]))


def test_devices_are_taken_in_turn() -> None:
    crew = Processes(Tiny("m", "cuda:0, cuda:1"), SETTINGS, 3)
    queue = crew._sources(multiprocessing.get_context("spawn"), 3)
    assert [queue.get().device for _ in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
