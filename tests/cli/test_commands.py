"""What the commands print, and what they leave behind."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

import conduit_kv
from conduit_kv.bench import run as bench_run
from conduit_kv.cli.app import app
from conduit_kv.cli.explain import depends_on_attention, explain
from conduit_kv.engine.selftest import Check, SelfTest
from conduit_kv.engine.vlm import VLM
from conduit_kv.methods import registry
from conduit_kv.methods.catalogue import NAMES
from conduit_kv.methods.evict import EvictMethod
from conduit_kv.plan import Plan
from tests.cli.conftest import Result
from tests.tiny import tiny_inputs, tiny_model
from tests.tiny.parts import picture

Run = Callable[..., Result]


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for number, path in enumerate(paths):
        picture(28, 28, number).save(path)
    return paths


def test_help_waits_for_nothing_heavy() -> None:
    code = (
        "import sys; from conduit_kv.cli import main; code = main(['--help']); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'heavy'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "ask", "methods", "selftest", "bench", "setup"):
        assert command in done.stdout


def test_version(run: Run) -> None:
    assert run("--version").out == f"conduit-kv {conduit_kv.__version__}\n"


def test_as_typer_calls_it(loads: list[str], images: list[Path]) -> None:
    asked = CliRunner().invoke(app, ["ask", "What?", "-i", str(images[0]), "--max-new-tokens", "3"])
    assert asked.exit_code == 0, asked.output
    assert CliRunner().invoke(app, ["ask", "What?", "-i", "missing.png"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "--n", "x"]).exit_code == 2


# -- ask -----------------------------------------------------------------------------------------


def test_ask(run: Run, loads: list[str], images: list[Path], tmp_path: Path) -> None:
    shown = tmp_path / "kept.png"
    result = run(
        "ask", "What is this?", "-i", images[0], "-i", images[1], "--plan", "tgv-kv:0.5",
        "--max-new-tokens", 4, "--picture", shown, "--model", "tiny",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert loads == ["tiny"]
    assert "plan tgv-kv:0.5" in result.out
    assert "by image" in result.out
    assert "K/V held" in result.out
    assert "first_token" in result.out
    with Image.open(shown) as written:
        assert written.width > 500


def test_ask_as_json(run: Run, loads: list[str], images: list[Path]) -> None:
    arguments = (
        "ask", "What is this?", "-i", images[0], "--plan", "snapkv:10", "--max-new-tokens", 4
    )  # fmt: skip
    plain, found = run(*arguments), run(*arguments, "--json")
    answer = json.loads(found.out)
    assert list(answer) == ["text", "tokens", "finish", "report"]
    assert plain.out.startswith(answer["text"])
    assert answer["report"]["plan"] == "snapkv:10"
    assert run(*arguments, "--stream").out.startswith(answer["text"])


def test_ask_repeats_with_a_seed(run: Run, loads: list[str], images: list[Path]) -> None:
    arguments = (
        "ask", "What?", "-i", images[0], "--json", "--max-new-tokens", 6, "--temperature", 2
    )  # fmt: skip
    one, two, three = (
        json.loads(run(*arguments, "--seed", seed).out)["tokens"] for seed in (1, 1, 2)
    )
    assert one == two
    assert one != three


def test_ask_without_images_and_with_stop(run: Run, loads: list[str]) -> None:
    whole = json.loads(run("ask", "What?", "--json", "--max-new-tokens", 8).out)
    stop = whole["text"][2:4]
    short = json.loads(run("ask", "What?", "--json", "--max-new-tokens", 8, "--stop", stop).out)
    assert short["text"] == whole["text"].partition(stop)[0]
    assert short["finish"] == "stop"


def test_ask_explains_the_plan(run: Run, loads: list[str], images: list[Path]) -> None:
    arguments = ("ask", "What?", "-i", images[0], "--max-new-tokens", 1, "--explain-plan")
    even = run(*arguments, "--plan", "snapkv:0.5").out
    assert "layers 0-3: " in even or "layers 0-" in even
    assert "follows from their attention" in run(*arguments, "--plan", "tgv-kv:0.5").out
    assert "does nothing" in run(*arguments, "--plan", "full").out
    assert "text besides" in run(*arguments, "--plan", "snapkv:0.5(of=visual)").out
    assert json.loads(run(*arguments, "--plan", "knorm:0.5", "--json").out)


def explained(plan: str) -> tuple[list[int], str]:
    """Counts per layer that the explanation states, and all of it."""
    vlm = VLM(*tiny_model("llava"))
    lines = list(explain(vlm, Plan.of(plan), tiny_inputs("llava")))
    counts = []
    for line in lines:
        if line.endswith(" each"):
            layers, _, count = line.removeprefix("  layers ").partition(": ")
            first, _, last = layers.partition("-")
            counts += [int(count.split()[0])] * (int(last or first) - int(first) + 1)
    return counts, "\n".join(lines)


@pytest.mark.parametrize(
    "plan", ["snapkv:0.5", "pyramidkv:0.5", "text-random:9", "uniform:0.4(of=visual)", "knorm:4kB"]
)
def test_explained_counts_are_those_kept(plan: str) -> None:
    vlm = VLM(*tiny_model("llava"))
    sequence = vlm.prefill(tiny_inputs("llava"), plan).report.sequences[0]
    of_visual = "of=visual" in plan
    kept = [sum(layer.images) if of_visual else layer.held for layer in sequence.layers]
    counts, text = explained(plan)
    assert sorted(counts) == sorted(kept), text


def test_explained_total_is_that_kept() -> None:
    vlm = VLM(*tiny_model("llava"))
    sequence = vlm.prefill(tiny_inputs("llava"), "tgv-kv:0.6").report.sequences[0]
    _, text = explained("tgv-kv:0.6")
    assert f"keeps {round(sequence.kept * 4)} of" in text


def test_who_shares_by_attention() -> None:
    """Found out by trial: no method has to say it of itself."""
    found = {
        name
        for name, method in registry().items()
        if issubclass(method, EvictMethod)
        and method.takes_budget()
        and depends_on_attention(method(budget="0.5"), 4)  # type: ignore
    }
    assert {"tgv-kv", "vl-cache", "prefixkv", "aircache"} <= found
    assert not {"snapkv", "pyramidkv", "random", "text-random", "uniform", "streaming-llm"} & found


# -- methods, selftest, setup --------------------------------------------------------------------


def test_methods(run: Run) -> None:
    text = run("methods").out
    for name, method in registry().items():
        assert name in text
        assert method.paper.rpartition("/")[2] in text
    for names in NAMES.values():
        for name in names:
            assert name in text.replace("\n", " ")
    assert {name for names in NAMES.values() for name in names} == set(registry())
    found = json.loads(run("methods", "--json").out)
    assert {entry["name"] for entry in found} == set(registry())
    assert "rows" in run("methods", "tgv-kv").out
    assert json.loads(run("methods", "tgv-kv", "--json").out)["options"]["rows"] == "text"


@pytest.mark.parametrize("passed", [True, False])
def test_selftest(
    passed: bool, run: Run, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = SelfTest((Check("a", True, "error 0"), Check("b", passed, "error 1")))
    monkeypatch.setattr(VLM, "selftest", lambda self: outcome)
    result = run("selftest", "--model", "tiny")
    assert result.code == (0 if passed else 1)
    assert ("FAIL b: error 1" in result.out) is not passed


def test_setup(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from conduit_kv import embedded

    monkeypatch.setattr(embedded, "install_parts", lambda say: say("installing"))
    monkeypatch.setattr(embedded, "ensure_built", lambda: tmp_path)
    result = run("setup", "embedded")
    assert result.code == 0
    assert "installing" in result.out
    assert str(tmp_path) in result.out


# -- bench ---------------------------------------------------------------------------------------


def test_bench(run: Run, loads: list[str], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = (
        "bench", "--model", "tiny", "--task", "board,board-late", "--plan", "full",
        "--plan", "tgv-kv:0.5", "--n", 2, "--timed", 1, "--control", "wrong-image", "--json", file,
    )  # fmt: skip
    result = run(*arguments)
    assert result.code == 0, result.err
    found = json.loads(file.read_text())
    assert len(found["rows"]) == 8
    assert found["manifest"]["seed"] == 0
    assert "board-late, late, n = 2, control: wrong-image" in result.out
    again = run(*arguments)
    assert again.code == 0
    assert "going on with 8 items" in again.err
    assert json.loads(file.read_text())["rows"] == found["rows"]
    other = run(*arguments, "--seed", 1)
    assert other.code == 2
    assert len(other.err.splitlines()) == 1


def test_bench_stopped(
    run: Run, loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench_run.answer
    calls: list[Any] = []

    def answer(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(bench_run, "answer", answer)
    file = tmp_path / "out.json"
    arguments = ("bench", "--task", "board", "--plan", "full", "--n", 4, "--timed", 0)
    stopped = run(*arguments, "--json", file)
    assert stopped.code == 130
    assert "2 items are kept" in stopped.err
    assert json.loads(file.read_text())["rows"][0]["n"] == 2
    finished = run(*arguments, "--json", file)
    assert finished.code == 0, finished.err
    assert len(calls) == 5
    assert json.loads(file.read_text())["rows"][0]["n"] == 4


# -- demo ----------------------------------------------------------------------------------------


def test_demo(run: Run, loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from conduit_kv.cli import demo

    monkeypatch.setattr(
        sys.modules["conduit_kv.cli.demo"],
        "QUESTIONS",
        (("One", "board", 0), ("Two", "haystack-2", 0), ("Three", "board-follow-up", 1)),
    )
    assert demo is not None
    shown = tmp_path / "demo.png"
    result = run("demo", "--picture", shown)
    assert result.code == 0, result.err
    for plan in ("full", "tgv-kv:0.5", "tgv-kv:0.2", "tgv-kv:0.1", "tgv-kv:0.05"):
        assert result.out.count(f"\n{plan} ") >= 3
    assert "of 3 right" in result.out
    with Image.open(shown) as written:
        assert written.height > 1000
