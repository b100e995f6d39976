"""Forecasts against models that are really built, and what a profile concludes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conduit_kv.bench.forecast import KNOWN, forecast, shape_of
from conduit_kv.bench.profile import Phases, Profile, profile
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import ModelError, PlanError
from conduit_kv.plan import Plan
from tests.cli.conftest import Result, loads, run  # noqa: F401
from tests.tiny import tiny_inputs, tiny_model

Run = Callable[..., Result]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model, _ = tiny_model("llava")
    model.config.save_pretrained(tmp_path)
    return tmp_path


def test_weights_are_those_of_the_model(config: Path) -> None:
    model, _ = tiny_model("llava")
    shape = shape_of(config, torch.float32)
    every = sum(p.numel() for p in model.parameters())
    assert shape.weights == 4 * every
    decoder = sum(p.numel() for p in model.model.language_model.layers.parameters())
    assert shape.parts["decoder layers"] == 4 * decoder


@pytest.mark.parametrize(
    "text", ["full", "snapkv:0.5", "snapkv:0.5(of=visual)", "uniform:6", "fastv:0.6", "rtn:4"]
)
def test_forecast_is_what_a_run_reports(config: Path, text: str) -> None:
    plan = Plan.of(text)
    inputs = tiny_inputs("llava")
    report = VLM(*tiny_model("llava")).prefill(inputs, plan).report
    (sequence,) = report.sequences
    shape = shape_of(config, torch.float32)
    (found,) = forecast(shape, plan, [sum(sequence.images)], sequence.text)
    assert found.kv_full == report.full_bytes
    if not text.startswith("rtn"):  # groups of 32 are filled up, which counts with few tokens
        assert found.kv_plan == pytest.approx(report.kv_bytes, rel=0.03)
    assert report.work
    assert found.prefill_full == pytest.approx(report.work.full_prefill.total)
    done = report.work.prefill.total - report.work.prefill.ranking
    assert found.prefill_plan == pytest.approx(done, rel=0.02)


@pytest.mark.parametrize("name", KNOWN)
def test_known_shapes(name: str) -> None:
    shape = shape_of(name)
    expected = {"qwen3-vl-8b": 8.77, "internvl3-9b": 9.14, "llava-next-7b": 7.57}[name]
    assert shape.weights / 2 / 1e9 == pytest.approx(expected, rel=0.03)
    few, many = forecast(shape, Plan.of("tgv-kv:0.2(of=visual) + rtn:4"), [1000, 1_000_000])
    assert many.kv_full == shape.layers * shape.kv_token * 1_000_128
    assert many.kv_plan == pytest.approx(many.kv_full * 0.2 * 5 / 16, rel=0.01)
    assert few.kv_share < many.kv_share < 1
    assert many.prefill_plan == many.prefill_full
    (routed,) = forecast(shape, Plan.of("pdrop:0.4"), [4096])
    assert routed.prefill_plan < 0.6 * routed.prefill_full


def test_what_cannot_be_forecast(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="qwen3-vl-8b"):
        shape_of(tmp_path / "none.json")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError):
        shape_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="model_type"):
        shape_of(tmp_path)
    with pytest.raises(PlanError, match="smallest"):
        forecast(shape_of("llava-next-7b"), Plan.of("fastv:0.01"), [1000])


def test_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = VLM(*tiny_model("llava"))
    found = profile(vlm, Plan.of("snapkv:0.5"), images=3, new=3, repeats=1)
    assert [each.images for each in found.full] == [1, 2, 3]
    full, plan = found.full[-1], found.plan[-1]
    assert plan.kv_bytes == pytest.approx(full.kv_bytes / 2, rel=0.05)
    assert full.prefill_flops == plan.prefill_flops > 0
    assert full.step_flops > plan.step_flops
    text = vlm.family.text_model(vlm.model)
    assert full.weight_bytes == 4 * (
        sum(p.numel() for p in text.layers.parameters()) + vlm.model.lm_head.weight.numel()
    )
    assert json.dumps(found.to_dict())


def phases(plan: str, images: int, whole: float, kv: int = 10) -> Phases:
    return Phases(plan, images, 10, 0.0, whole, 0.0, kv, 100, {}, 0.0, 0.0, ())


@pytest.mark.parametrize(
    ("seconds", "pays"),
    [
        ([(1, 2), (1, 0.9), (2, 1)], 2),
        ([(1, 0.5), (1, 2), (2, 1)], 4),  # a lucky measurement before is no crossover
        ([(1, 0.5), (1, 0.5), (1, 2)], None),
        ([(1, 0.5), (1, 0.5), (1, 0.5)], 1),
    ],
)
def test_crossover(seconds: list[tuple[float, float]], pays: int | None) -> None:
    full = tuple(phases("full", 2**n, a) for n, (a, _) in enumerate(seconds))
    plan = tuple(phases("p", 2**n, b) for n, (_, b) in enumerate(seconds))
    found = Profile("m", 5, full, plan)
    assert found.pays_from == pays
    said = "\n".join(found.verdict())
    assert ("does not come earlier" in said) is (pays is None)
    assert "weights are the bottleneck" in said


def test_commands(
    run: Run,  # noqa: F811
    loads: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    done = run("profile", "--plan", "snapkv:0.5", "--images", 2, "--tokens", 3, "--repeats", 1,
               "--json", tmp_path / "p.json")  # fmt: skip
    assert done.code == 0, done.err
    assert "of the K/V at 2 images" in done.out
    found: Any = json.loads((tmp_path / "p.json").read_text())
    assert len(found["full"]) == 2
    page, figures = tmp_path / "f.html", tmp_path / "f.json"
    done = run("profile", "--config", "llava-next-7b", "--plan", "tgv-kv:0.2", "--sizes",
               "1000,64000", "-o", page, "--json", figures)  # fmt: skip
    assert done.code == 0, done.err
    assert "64,000" in done.out
    assert "llava-next-7b, plan" in page.read_text()
    assert [row["visual"] for row in json.loads(figures.read_text())[0]["rows"]] == [1000, 64000]
    for bad in (("--sizes", "many"), ("--sizes", "0")):
        assert run("profile", "--plan", "full", "--config", "internvl3-9b", *bad).code == 2
    assert run("profile", "--plan", "full", "--sizes", "10").code == 2
