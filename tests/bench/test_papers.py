"""Every published table can be read, is about plans that there are, and dry-runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conduit_kv.bench.papers import commands, read_paper, run_commands
from conduit_kv.errors import InputError, PlanError
from tests.cli.conftest import Result, loads, run  # noqa: F401

Run = Callable[..., Result]
FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "papers").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_tables(file: Path, tmp_path: Path) -> None:
    paper = read_paper(file)
    assert paper.link.startswith("https://arxiv.org/abs/")
    assert paper.published
    try:
        plans = paper.plans
        paper.dry.settings()
    except PlanError as error:
        assert "not available in this version" in str(error)
        pytest.skip(str(error))
    found = commands(paper, tmp_path, 8)
    assert len(found) == len(plans) * len(paper.sweep.models)
    for command in found:
        assert command[command.index("--tasks") + 1] == ",".join(paper.lmms)
        assert command[-2:] == ["--limit", "8"]


def test_all_seven_systems() -> None:
    assert len(FILES) == 7


def test_dry_run(
    run: Run,  # noqa: F811
    loads: list[str],  # noqa: F811
    tmp_path: Path,
) -> None:
    table = next(file for file in FILES if file.stem == "windowquant")
    result = run("paper", table, "--dry-run", "--out", tmp_path)
    assert result.code == 0, result.err
    assert loads == ["embedded"]
    assert "would run:" in result.out
    assert "pretrained=llava-hf/llava-1.5-7b-hf" in result.out
    assert "published: not stated, average bits: windowquant 3.17" in result.out
    assert (tmp_path / "windowquant" / "dry" / "embedded.json").exists()


def test_what_is_no_table(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    good = {
        "paper": {"title": "t", "link": "l", "table": "1"},
        "tasks": ["board"],
        "plans": ["full"],
        "dry": {"tasks": ["board"]},
    }
    for changes, message in (
        ({"paper": {"title": "t"}}, "title, link and table"),
        ({"dry": None}, "dry says"),
        ({"tasks": []}, "name tasks"),
        ({"published": [{"plan": "full"}]}, "plan and value"),
        ({"models": ["a"], "plan": "x"}, "did you mean plans"),
    ):
        file.write_text(yaml.safe_dump(good | changes))
        with pytest.raises(InputError, match=message):
            read_paper(file)


def test_commands_that_are_done_are_not_run_again(tmp_path: Path) -> None:
    python = ["python3", "-c", "import sys; sys.exit(3)"]
    command = [*python, "--output_path", str(tmp_path / "a")]
    with pytest.raises(InputError, match="ended with 3"):
        run_commands([command])
    (tmp_path / "a" / "x_results.json").write_text("{}")
    run_commands([command])
