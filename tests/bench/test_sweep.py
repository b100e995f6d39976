"""Sweeps from files and the command line, and rows as tables."""

import json
from pathlib import Path

import pytest

from conduit_kv.bench.rows import read_rows, write_rows
from conduit_kv.bench.sweep import Sweep, plans_of, read_sweep, slug
from conduit_kv.errors import InputError, PlanError
from conduit_kv.report import load
from tests.cli.conftest import loads, run  # noqa: F401
from tests.cli.test_commands import Run


def test_plans_and_budgets() -> None:
    texts = ("full", "tgv-kv:{}(of=visual)", "snapkv:{}")
    assert [str(plan) for plan in plans_of(texts, ("0.5", "128"))] == [
        "full", "tgv-kv:0.5(of=visual)", "tgv-kv:128(of=visual)", "snapkv:0.5", "snapkv:128"
    ]  # fmt: skip
    with pytest.raises(PlanError, match="no budgets"):
        plans_of(("tgv-kv:{}",))
    with pytest.raises(PlanError, match="are for plans"):
        plans_of(("full",), ("0.5",))


def test_a_sweep_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "models: [embedded, ./other]\ntasks: board\nplans: [full, 'tgv-kv:{}']\n"
        "budgets: [0.5, 64]\nn: 7\ncontrols: [random]\nworkers: 2\n"
    )
    sweep = read_sweep(file)
    assert sweep.models == ("embedded", "./other")
    assert sweep.budgets == ("0.5", "64")
    settings = sweep.replace(n=3, seed=None).settings()
    assert (settings.n, settings.seed) == (3, 0)
    assert [str(plan) for plan in settings.plans] == [
        "full", "tgv-kv:0.5", "tgv-kv:64", "text-random:0.5", "text-random:64"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: [board]", "did you mean tasks"),
        ("n: many", "whole number"),
        ("n: true", "whole number"),
        ("plans: [{a: 1}]", "holds text"),
        ("- a", "write names and values"),
        ("a: [", "cannot be read"),
    ],
)
def test_what_is_no_sweep(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_sweep(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_sweep(tmp_path / "none.yaml")


def test_every_field_can_be_written(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    sweep = Sweep(tasks=("board",), against="full", dtype="float32", device="cpu")
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(sweep).items()}
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump(plain))
    assert read_sweep(file) == sweep


def test_slugs() -> None:
    assert slug("Qwen/Qwen3-VL-8B-Instruct") == "Qwen-Qwen3-VL-8B-Instruct"
    assert slug("../models/my model/") == "models-my-model"
    assert slug("/") == "model"


def test_sweep_of_two_models(
    run: Run,  # noqa: F811
    loads: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    config = tmp_path / "sweep.yaml"
    config.write_text(
        "tasks: [board]\nplans: ['tgv-kv:{}', full]\nbudgets: [0.5]\nn: 9\ntimed: 0\n"
    )
    folder, table = tmp_path / "results", tmp_path / "rows.parquet"
    arguments = (
        "bench", "-c", config, "-m", "one/a", "-m", "two/b", "--n", 2, "--samples", 1,
        "--json", folder, "--rows", table,
    )  # fmt: skip
    result = run(*arguments)
    assert result.code == 0, result.err
    assert loads == ["one/a", "two/b"]
    rows = read_rows(table)
    assert [(row["model"], row["plan"]) for row in rows] == [
        ("one/a", "tgv-kv:0.5"), ("one/a", "full"), ("two/b", "tgv-kv:0.5"), ("two/b", "full")
    ]  # fmt: skip
    found = json.loads((folder / "two-b.json").read_text())["rows"]
    assert found == rows[2:]
    write_rows(rows, tmp_path / "rows.jsonl")
    assert read_rows(tmp_path / "rows.jsonl") == rows
    assert load([table]).models == ["one/a", "two/b"]
    page = tmp_path / "report.html"
    told = run("report", folder, "-o", page)
    assert told.code == 0, told.err
    assert "one/a, one question, a short answer: full" in told.out
    assert page.stat().st_size > 100_000
    assert run("bench", "-t", "board", "-m", "a", "-m", "b", "--json", "x.json").code == 2
    assert run("bench", "-t", "board", "--rows", tmp_path / "rows.csv").code == 2
    assert run("report", folder, "-o", page, "--margin", -1).code == 2
