"""What the page says, that it is whole by itself, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conduit_kv.bench.protocols import prompt_of
from conduit_kv.bench.run import Bench, Settings
from conduit_kv.bench.samples import look
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import InputError
from conduit_kv.picture import Retention
from conduit_kv.plan import Plan
from conduit_kv.report import load, write_page
from conduit_kv.report.figures import curve, front, pareto
from conduit_kv.report.page import page
from conduit_kv.tasks import get_task
from tests.report.conftest import Write, row
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def vlm() -> VLM:
    return VLM(*tiny_model("llava"), "tiny")


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return dict(json.loads(found[1]))


def test_page_of_a_run(vlm: VLM, tmp_path: Path) -> None:
    """From the bench to the page: rows, samples with what was kept, answers."""
    file = tmp_path / "out.json"
    plans = (Plan.of("full"), Plan.of("tgv-kv:0.5"), Plan.of("ada-kv:0.3"))
    settings = Settings(("board-late", "haystack-2"), plans, 2, timed=0, samples=1)
    Bench(vlm, settings, file).run()
    results = load([file])
    assert [(s.task, list(s.kept)) for s in results.samples] == [
        ("board-late", ["tgv-kv:0.5", "ada-kv:0.3"]),
        ("haystack-2", ["tgv-kv:0.5", "ada-kv:0.3"]),
    ]
    sample = results.samples[0]
    assert set(sample.answers) == {"full", "tgv-kv:0.5", "ada-kv:0.3"}
    kept = sample.kept["tgv-kv:0.5"]["evict"]
    item = get_task("board-late").items(1)[0]
    state = vlm.prefill(prompt_of(vlm, item, "late").head, "tgv-kv:0.5")
    expected = state.report.sequences[0]
    for layer, each in enumerate(expected.layers):
        assert kept["images"][0]["share"][layer] * expected.images[0] == pytest.approx(
            each.images[0], abs=0.01
        )
        assert kept["text"][layer] * expected.text == pytest.approx(each.text, abs=0.01)
    text = write_page(results, tmp_path / "out.html").read_text()
    data = data_of(text)
    assert len(data["samples"][1]["images"]) == 2
    assert data["samples"][0]["answers"]["full"][0] == sample.answers["full"][0]
    assert "Only 2 items" in text


def test_samples_are_gone_on_with(vlm: VLM, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    one = (Plan.of("tgv-kv:0.5"),)
    Bench(vlm, Settings(("board",), one, 1, timed=0, samples=1), file).run()
    before = file.with_suffix(".items.jsonl").read_text()
    more = (*one, Plan.of("knorm:0.5"))
    Bench(vlm, Settings(("board",), more, 1, timed=0, samples=1), file).run()
    added = file.with_suffix(".items.jsonl").read_text().removeprefix(before).splitlines()
    assert [list(json.loads(line)["kept"]) for line in added if "looked" in line] == [["knorm:0.5"]]
    assert set(load([file]).samples[0].kept) == {"tgv-kv:0.5", "knorm:0.5"}


def test_look_is_what_each_plan_keeps_alone(vlm: VLM) -> None:
    item = get_task("board").items(1)[0]
    prompt = prompt_of(vlm, item, "short")
    plans = [Plan.of("tgv-kv:0.4"), Plan.of("snapkv:0.3")]
    for plan, stages in zip(plans, look(vlm, prompt, plans), strict=True):
        assert list(stages) == ["evict"]
        alone = Retention.of(vlm.prefill(prompt.head, plan).cache)
        assert np.array_equal(stages["evict"].held, alone.held)


def test_the_page_needs_no_network(write: Write) -> None:
    text = page(load([write([row("board", "tgv-kv:0.2", 0.9, 0.9)])]))
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", own)
    assert "@import" not in own
    assert "<link" not in own


def test_the_page_says_what_to_take(write: Write) -> None:
    rows = [
        row("board", "full", 0.9, 0.9),
        row("board", "tgv-kv:0.2", 0.9, 0.9),
        row("board", "text-random:0.2", 0.4, 0.9),
        row("board-list", "tgv-kv:0.2", 0.5, 0.9, protocol="list"),
    ]
    text = " ".join(page(load([write(rows)])).partition("<script")[0].split())
    first, _, second = text.partition("A long answer")
    assert "Take <code>tgv-kv:0.2</code>" in first
    assert "Chance under the same budget: 40 %" in first
    assert "Stay with the full cache" in second
    assert "Not measured: a conversation about one image" in second


def test_hostile_names_stay_text(write: Write) -> None:
    bad = "</script><script>alert(1)</script>"
    rows = [row(bad, "tgv-kv:0.2", 0.9, 0.9)]
    text = page(load([write(rows)]), title=bad)
    assert bad not in text
    assert bad in data_of(text)["curves"]["toy"]


def test_several_files_and_models(write: Write, tmp_path: Path) -> None:
    write([row("board", "tgv-kv:0.2", 0.9, 0.9, n=10)], "a.json", complete=False)
    write([row("board", "tgv-kv:0.2", 0.8, 0.9)], "b.json", mixed=["seed was 0, is 1"])
    write([row("board", "tgv-kv:0.2", 0.7, 0.9, model="other")], "c.json")
    (tmp_path / "speed.json").write_text('{"manifest": {}, "prefill": []}')
    results = load([tmp_path])
    assert results.models == ["toy", "other"]
    assert [r["accuracy"] for r in results.rows] == [0.8, 0.7]
    text = page(results)
    assert '<select id="model">' in text
    assert "seed was 0, is 1" in text
    assert "a.json was stopped" in text


def test_what_is_no_result(write: Write, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load([tmp_path / "none.json"])
    with pytest.raises(InputError, match="no results"):
        load([tmp_path])
    (tmp_path / "speed.json").write_text('{"manifest": {}, "prefill": []}')
    with pytest.raises(InputError, match="cannot be read"):
        load([tmp_path / "speed.json"])
    with pytest.raises(InputError, match="rows lack"):
        load([write([{"plan": "full"}])])
    good = load([write([row("board", "tgv-kv:0.2", 0.9, 0.9)])])
    with pytest.raises(InputError, match="cannot be written"):
        write_page(good, tmp_path)


def test_an_absent_extra_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"pip install 'conduit-kv\[bench\]'"):
        page(load([write([row("board", "tgv-kv:0.2", 0.9, 0.9)])]))


def test_front_by_trying_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        points = [(float(a), float(b)) for a, b in rng.integers(0, 6, (12, 2))]
        chosen = {points[number] for number in front(points)}
        beaten = {
            p for p in points for q in points
            if q != p and q[0] <= p[0] and q[1] >= p[1]
        }  # fmt: skip
        assert chosen == set(points) - beaten


def test_curves() -> None:
    rows = [
        row("board", "full", 0.9, 0.9),
        row("board", "tgv-kv:0.5", 0.88, 0.9),
        row("board", "tgv-kv:0.1", 0.7, 0.9),
        row("board", "text-random:0.1", 0.5, 0.9),
    ]
    found = curve(rows, "accuracy")
    assert found
    ours, chance, full = found["data"]
    assert (ours["name"], ours["x"], ours["y"]) == ("tgv-kv", [0.1, 0.5], [0.7, 0.88])
    assert ours["error_y"]["array"] == [0.04, 0.04]
    assert chance["line"]["color"] == "chance"
    assert full["y"] == [0.9, 0.9]
    assert curve(rows[:1], "accuracy") is None
    assert pareto([], None, "bytes") is None
