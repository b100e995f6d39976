"""The page about adding a method is followed to the letter, and the method removed again."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import PlanError
from conduit_kv.methods import base, registry
from conduit_kv.plan import Plan
from tests.tiny import tiny_inputs, tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add-a-method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r'^```python(?: title="([^"]+)")?\n(.*?)^```$', PAGE, re.M | re.S)
FILES = {name: code for name, code in BLOCKS if name}


@pytest.fixture
def method(tmp_path: Path) -> Iterator[ModuleType]:
    path = tmp_path / "v_norm.py"
    path.write_text(FILES["v_norm.py"])
    spec = importlib.util.spec_from_file_location("v_norm", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["v_norm"] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        base._REGISTRY.pop("v-norm", None)
        del sys.modules["v_norm"]


def test_the_file_does_what_the_page_says(method: ModuleType) -> None:
    assert registry()["v-norm"] is method.VNorm
    assert str(Plan.parse("v-norm:0.2(order=1)")) == "v-norm:0.2(order=1.0)"
    with pytest.raises(PlanError, match="order"):
        Plan.parse("v-norm:0.2(order=many)")
    vlm = VLM(*tiny_model("llava"))
    inputs = tiny_inputs("llava")
    report = vlm.prefill(inputs, "v-norm:0.4").report
    assert report.sequences[0].kept == pytest.approx(0.4 * report.sequences[0].tokens, abs=0.3)
    plain, full = (vlm.prefill(inputs, plan).logits for plan in ("full", "v-norm:1.0"))
    torch.testing.assert_close(plain, full, atol=1e-5, rtol=1e-5)


def test_the_reference_holds(method: ModuleType) -> None:
    scope: dict[str, object] = {}
    exec(compile(FILES["test_v_norm.py"], "test_v_norm.py", "exec"), scope)
    (test,) = (value for name, value in scope.items() if name.startswith("test_"))
    test()  # type: ignore[operator]


def test_the_reference_can_fail(method: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = method.VNorm.score

    def wrong(self: object, view: object) -> object:
        found = real(self, view)
        return type(found)(-found.token, found.tier)

    monkeypatch.setattr(method.VNorm, "score", wrong)
    with pytest.raises(AssertionError):
        test_the_reference_holds(method)


def test_the_last_block_runs(method: ModuleType) -> None:
    (code,) = (code for name, code in BLOCKS if not name)
    scope: dict[str, object] = {}
    exec(compile(code, "page", "exec"), scope)
    names = [str(plan) for plan in scope["settings"].plans]  # type: ignore[attr-defined]
    assert names[0] == "v-norm:0.5(of=visual)"
    assert len(names) == 6


def test_the_file_is_written_as_the_project_writes(tmp_path: Path) -> None:
    path = tmp_path / "v_norm.py"
    path.write_text(FILES["v_norm.py"])
    for command in (("check", "--config", str(ROOT / "pyproject.toml")), ("format", "--check")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "--line-length=100", str(path)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
