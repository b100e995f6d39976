"""lmms-eval's requests, made up: batches, order, stops, and the bench's own answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from conduit_kv.bench.run import Bench, Settings
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import InputError
from conduit_kv.integrations.lmms_adapter import Adapter, chat_of
from conduit_kv.plan import Plan
from conduit_kv.tasks import get_task
from tests.tiny import tiny_model

TASKS = ("board", "haystack-2")
PLAN = Plan.of("tgv-kv:0.5(of=visual)")


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*tiny_model("llava"), "tiny")


def messages_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """As a task of lmms-eval makes them, with the images that they show."""
    item = get_task(document["task"]).items(document["number"] + 1)[document["number"]]
    content: list[dict[str, Any]] = []
    for number, image in enumerate(item.images, 1):
        if len(item.images) > 1:
            content.append({"type": "text", "text": f"Image {number}:"})
        content.append({"type": "image", "url": image})
    content.append({"type": "text", "text": item.question})
    return [{"role": "user", "content": content}]


DOCUMENTS = {
    task: {"test": [{"task": task, "number": number} for number in range(3)]} for task in TASKS
}


def request(task: str, number: int, **settings: Any) -> Any:
    settings = {"max_new_tokens": 16, "until": []} | settings
    return SimpleNamespace(args=("", messages_of, settings, number, task, "test"))


REQUESTS = [request(task, number) for number in range(3) for task in TASKS]


@pytest.mark.parametrize("batch", [1, 4, 6])
def test_answers_are_the_benchs(vlm: VLM, batch: int) -> None:
    """Whatever the batch, and whatever stands beside in it."""
    bench = Bench(vlm, Settings(TASKS, (PLAN,), 3, timed=0))
    bench.run()
    found = Adapter(vlm, PLAN, batch).answer(REQUESTS, DOCUMENTS)
    for asked, answer in zip(REQUESTS, found, strict=True):
        item = get_task(asked.args[4]).items(3)[asked.args[3]]
        known = bench.record.get(asked.args[4], None, item.id, str(PLAN))
        assert known
        assert answer.text == known[0].text
        assert answer.kept == pytest.approx(known[0].kept)
        assert answer.kv_bytes == known[0].kv_bytes


def test_stops_and_limits(vlm: VLM) -> None:
    (whole,) = Adapter(vlm, PLAN).answer([request("board", 0)], DOCUMENTS)
    assert len(whole.text) > 6
    stop = whole.text[3:5]
    asked = [request("board", 0, until=[stop, ""]), request("board", 0, max_new_tokens=2)]
    cut, short = Adapter(vlm, PLAN, 2).answer(asked, DOCUMENTS)
    assert cut.text == whole.text.partition(stop)[0].strip()
    assert cut.tokens < whole.tokens
    assert short.tokens == 2
    assert (
        Adapter(vlm, PLAN).answer([request("board", 0, until=stop)], DOCUMENTS)[0].text == cut.text
    )


@pytest.mark.parametrize("bad", [{"temperature": 0.7}, {"num_beams": 3}, {"do_sample": True}])
def test_what_is_not_greedy_is_refused(vlm: VLM, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="greedy"):
        Adapter(vlm, PLAN).answer([request("board", 0, **bad)], DOCUMENTS)


def test_log(vlm: VLM, tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    Adapter(vlm, PLAN, 2, log=log).answer(REQUESTS[:3], DOCUMENTS)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["task"], line["document"]) for line in lines] == [
        ("board", 0), ("haystack-2", 0), ("board", 1)
    ]  # fmt: skip
    assert all(line["kv_bytes"] < line["full_bytes"] for line in lines)
    assert lines[0]["plan"] == str(PLAN)


def test_messages() -> None:
    pictures = [Image.new("RGB", (8, 8), (n, 0, 0)) for n in range(9)]
    chat, images = chat_of(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image", "url": pictures[8]},
                                         {"type": "text", "text": "What?"},
                                         {"type": "video", "url": pictures[:8]}]},
        ],
        frames=4,
    )  # fmt: skip
    assert chat[0]["content"] == [{"type": "text", "text": "Be brief."}]
    assert [part["type"] for part in chat[1]["content"]] == ["image", "text", *["image"] * 4]
    assert [image.getpixel((0, 0))[0] for image in images] == [8, 0, 2, 4, 6]
    with pytest.raises(InputError, match="audio"):
        chat_of([{"role": "user", "content": [{"type": "audio", "url": "x"}]}])
    with pytest.raises(InputError, match="no frames"):
        chat_of([{"role": "user", "content": [{"type": "video", "url": []}]}])
    with pytest.raises(InputError, match="at least 1"):
        Adapter(None, PLAN, 0)  # type: ignore[arg-type]
