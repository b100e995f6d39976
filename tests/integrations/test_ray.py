"""What is handed to Ray Data and what comes back, with a stand-in; a real cluster: `make ray`."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from conduit_kv.bench.parallel import Source
from conduit_kv.bench.run import Bench, Settings, Unit
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import InputError
from conduit_kv.integrations.ray import RayCluster
from conduit_kv.plan import Plan
from tests.tiny import tiny_model

SETTINGS = Settings(("board-late",), (Plan.of("full"), Plan.of("tgv-kv:0.5")), 3, timed=0)


class Tiny(Source):
    """The tiny model, not loaded from anywhere."""

    def load(self) -> VLM:
        return VLM(*tiny_model("llava"), "tiny")


class Dataset:
    """What of a dataset is used: rows pass through pickles, and come back in another order."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def map(self, worker: Callable[..., Any], *, fn_constructor_args: Any, **options: Any) -> Any:
        assert options == {"concurrency": 2, "num_gpus": 0}
        actor = worker(*pickle.loads(pickle.dumps(fn_constructor_args)))
        return Dataset([pickle.loads(pickle.dumps(actor(row))) for row in self.rows])

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows[::-1])


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    seen = SimpleNamespace(addresses=[])
    module, data = ModuleType("ray"), ModuleType("ray.data")

    def init(address: str, log_to_driver: bool) -> None:
        seen.addresses.append(address)
        if address == "nowhere:1":
            raise ConnectionError("refused")

    def from_items(rows: list[dict[str, Any]], override_num_blocks: int) -> Dataset:
        assert override_num_blocks == len(rows)
        return Dataset(rows)

    module.is_initialized = lambda: False  # type: ignore[attr-defined]
    module.init = init  # type: ignore[attr-defined]
    data.from_items = from_items  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.data", data)
    return seen


def test_rows_are_those_of_this_process(ray: SimpleNamespace) -> None:
    source = Tiny("tiny")
    vlm = source.load()
    alone = Bench(vlm, SETTINGS).run()
    assert (
        Bench(vlm, SETTINGS).run(crew=RayCluster(source, SETTINGS, 2, "local"))["rows"]
        == (alone["rows"])
    )
    assert ray.addresses == ["local"]


def test_errors(ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    units = [Unit(0, 0, ("full",))]
    with pytest.raises(InputError, match="no Ray cluster at nowhere:1"):
        list(RayCluster(Tiny("tiny"), SETTINGS, 2, "nowhere:1")(units))
    assert list(RayCluster(Tiny("tiny"), SETTINGS, 2, "nowhere:1")([])) == []
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'conduit-kv\[ray\]'"):
        list(RayCluster(Tiny("tiny"), SETTINGS, 1, "auto")(units))
    with pytest.raises(InputError, match="at least one"):
        RayCluster(Tiny("tiny"), SETTINGS, 0, "auto")
