"""The command line over a tiny model, called as the shell calls it."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from conduit_kv.engine import load
from conduit_kv.engine.vlm import VLM
from tests.tiny import tiny_model


@dataclass(frozen=True)
class Result:
    """What a command said."""

    code: int
    out: str
    err: str


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every model is the tiny one; gives the names of those that were loaded."""
    names: list[str] = []

    def fake(model: str, **options: object) -> VLM:
        names.append(model)
        return VLM(*tiny_model("llava"), model)

    monkeypatch.setattr(load, "load", fake)
    return names


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command of the command line."""
    from conduit_kv.cli import main

    def call(*arguments: object) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call
