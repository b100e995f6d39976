"""Rows and manifest, going on after a stop, and results that must not be mixed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conduit_kv.bench import run as bench_run
from conduit_kv.bench.record import Record, items_path
from conduit_kv.bench.run import Bench, Settings
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import InputError
from conduit_kv.plan import Plan

KEYS = [
    "model",
    "task",
    "plan",
    "n",
    "accuracy",
    "accuracy_low",
    "accuracy_high",
    "agreement",
    "kept_tokens",
    "total_tokens",
    "kv_bytes",
    "prefill_s",
    "first_token_s",
    "per_token_s",
]


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "tasks": ("board-late",),
        "plans": (Plan.of("full"), Plan.of("tgv-kv:0.5")),
        "n": 3,
        "timed": 0,
    }
    return Settings(**values | changes)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The plans of each call that asks the model."""
    calls: list[list[str]] = []
    real = bench_run.answer

    def answer(vlm: VLM, prompt: Any, plans: Any) -> Any:
        calls.append([str(plan) for plan in plans])
        return real(vlm, prompt, plans)

    monkeypatch.setattr(bench_run, "answer", answer)
    return calls


def stop_after(steps: int) -> Callable[[str], None]:
    left = [steps]

    def progress(_: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return progress


def test_rows_and_manifest(vlm: VLM, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    chosen = settings(tasks=("board", "haystack-2-follow-up"), timed=1, n=2)
    steps: list[str] = []
    bench = Bench(vlm, chosen, file)
    found = bench.run(steps.append)
    assert json.loads(file.read_text()) == found
    assert len(steps) == bench.steps
    assert list(found) == ["manifest", "rows"]
    assert [(row["task"], row["plan"]) for row in found["rows"]] == [
        (task, plan) for task in chosen.tasks for plan in ("full", "tgv-kv:0.5")
    ]
    for row in found["rows"]:
        assert list(row)[: len(KEYS)] == KEYS
        assert row["n"] == 2
        assert 0 <= row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] <= 1
        assert row["seed"] == 0
        assert row["per_token_s"] > 0
        assert row["control"] is None
    full, half = found["rows"][:2]
    assert full["agreement"] == 1.0
    assert full["kept_tokens"] == full["total_tokens"]
    assert full["kv_bytes"] == full["full_bytes"]
    assert half["kept_tokens"] == pytest.approx(full["total_tokens"] / 2, abs=0.2)
    assert found["rows"][2]["n_images"] == 2
    manifest = found["manifest"]
    assert manifest["complete"] is True
    assert manifest["versions"]["torch"]
    assert manifest["machine"]["cores"]
    assert manifest["protocols"].keys() == {"short", "follow-up"}
    assert len(manifest["prompt_template"]) == 64
    assert manifest["pixels"]["crop_size"]


def test_without_a_file_nothing_is_written(vlm: VLM, tmp_path: Path) -> None:
    assert len(Bench(vlm, settings(n=1)).run()["rows"]) == 2
    assert not list(tmp_path.iterdir())


def test_goes_on_after_a_stop(vlm: VLM, tmp_path: Path, asked: list[list[str]]) -> None:
    whole = Bench(vlm, settings()).run()
    asked.clear()
    file = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        Bench(vlm, settings(), file).run(stop_after(2))
    part = json.loads(file.read_text())
    assert part["manifest"]["complete"] is False
    assert [row["n"] for row in part["rows"]] == [2, 2]
    assert len(asked) == 2
    again = Bench(vlm, settings(), file)
    assert len(again.record) == 2
    assert again.run()["rows"] == whole["rows"]
    assert len(asked) == 3


def test_two_runs_do_not_go_on_with_one_file(vlm: VLM, tmp_path: Path) -> None:
    file = tmp_path / "out.json"

    def second(_: str) -> None:
        with pytest.raises(InputError, match="another run"):
            Bench(vlm, settings(), file).run()

    rows = Bench(vlm, settings(), file).run(second)["rows"]
    assert Bench(vlm, settings(), file).run()["rows"] == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.items.jsonl", "out.json"]


def test_more_items_and_plans_ask_only_what_is_new(
    vlm: VLM, tmp_path: Path, asked: list[list[str]]
) -> None:
    file = tmp_path / "out.json"
    Bench(vlm, settings(n=1), file).run()
    asked.clear()
    more = (Plan.of("full"), Plan.of("tgv-kv:0.5"), Plan.of("knorm:0.5"), Plan.of("h2o:1.0"))
    found = Bench(vlm, settings(n=2, plans=more), file).run()
    # The setting that does nothing is the full cache, which is run already.
    assert asked == [["knorm:0.5"], ["full", "tgv-kv:0.5", "knorm:0.5"]]
    assert [row["plan"] for row in found["rows"]] == [str(plan) for plan in more]
    assert found["rows"][3]["accuracy"] == found["rows"][0]["accuracy"]


def test_other_conditions_are_not_mixed(vlm: VLM, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    Bench(vlm, settings(n=1), file).run()
    with pytest.raises(InputError, match="seed was 0, is 1"):
        Bench(vlm, settings(n=1, seed=1), file)
    kept = Bench(vlm, settings(n=1, seed=1), file, "keep")
    assert kept.run()["manifest"]["mixed"] == ["seed was 0, is 1"]
    # Once mixed it stays said, whatever the conditions are now.
    assert "mixed" in Bench(vlm, settings(n=1), file, "keep").run()["manifest"]
    fresh = Bench(vlm, settings(n=1, seed=1), file, "restart")
    assert not fresh.record
    assert "mixed" not in fresh.run()["manifest"]


def test_other_weights_are_other_conditions(vlm: VLM, tmp_path: Path) -> None:
    import copy

    file = tmp_path / "out.json"
    Bench(vlm, settings(n=1), file).run()
    other = VLM(copy.deepcopy(vlm.model), vlm.processor, "tiny")
    next(other.model.parameters()).data[0] += 1
    with pytest.raises(InputError, match=r"model\.weights was"):
        Bench(other, settings(n=1), file)


def test_an_item_that_changed_is_asked_again(
    vlm: VLM, tmp_path: Path, asked: list[list[str]]
) -> None:
    file = tmp_path / "out.json"
    Bench(vlm, settings(n=2), file).run()
    lines = items_path(file).read_text().splitlines()
    changed = json.loads(lines[1]) | {"digest": "0" * 16}
    items_path(file).write_text("\n".join([lines[0], json.dumps(changed), lines[2]]) + "\n")
    asked.clear()
    assert Bench(vlm, settings(n=2), file).run()["rows"][0]["n"] == 2
    assert len(asked) == 1


def test_a_line_cut_off_is_asked_again(vlm: VLM, tmp_path: Path, asked: list[list[str]]) -> None:
    file = tmp_path / "out.json"
    Bench(vlm, settings(n=2), file).run()
    text = items_path(file).read_text()
    items_path(file).write_text(text[: len(text) - 40])
    asked.clear()
    Bench(vlm, settings(n=2), file).run()
    assert len(asked) == 1
    assert Bench(vlm, settings(n=2), file).run()["rows"][0]["n"] == 2


def test_files_in_the_way(vlm: VLM, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text("{}")
    with pytest.raises(InputError, match="does not"):
        Bench(vlm, settings(n=1), file)
    items_path(file).write_text("no JSON\n")
    with pytest.raises(InputError, match="cannot be read"):
        Record(file, {})


def test_wrong_image(vlm: VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = bench_run.prompt_of

    def prompt_of(vlm: VLM, item: Any, protocol: str, images: Any) -> Any:
        seen.append((item, images))
        return real(vlm, item, protocol, images)

    monkeypatch.setattr(bench_run, "prompt_of", prompt_of)
    found = Bench(vlm, settings(n=2, controls=("wrong-image",))).run()
    assert [row["control"] for row in found["rows"]] == [None, None, "wrong-image", "wrong-image"]
    for item, images in seen[:2]:
        assert images == item.images
    for item, images in seen[2:]:
        assert images != item.images


def test_random_control_and_against(vlm: VLM) -> None:
    chosen = settings(
        plans=(Plan.of("tgv-kv:0.5(of=visual)"),),
        controls=("random",),
        against=Plan.of("snapkv:0.5(of=visual)"),
        n=1,
    )
    found = Bench(vlm, chosen).run()
    assert [row["plan"] for row in found["rows"]] == [
        "tgv-kv:0.5(of=visual)",
        "text-random:0.5(of=visual)",
    ]
    assert found["rows"][0]["against"] == "snapkv:0.5(of=visual)"
    assert found["rows"][0]["vs_against"]["verdict"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": ()},
        {"plans": ()},
        {"n": 0},
        {"timed": -1},
        {"controls": ("no-image",)},
        {"tasks": ("bord",)},
    ],
)
def test_bad_settings(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        settings(**changes)
