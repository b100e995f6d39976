"""``conduit-kv store``, as a new user would try it."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from conduit_kv import VLM
from conduit_kv.cli import main
from tests.tiny import tiny_model
from tests.tiny.parts import picture


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "pictures"
    (folder / "more").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.png", "more/c.png")):
        Image.fromarray(_pixels(number)).save(folder / name)
    (folder / "notes.txt").write_text("no picture")
    (folder / "broken.png").write_bytes(b"no picture either")

    def load(*args: object, **kwargs: object) -> VLM:
        return VLM(*tiny_model("qwen2.5-vl"), name="tiny")

    for command in ("store", "ask"):
        monkeypatch.setattr(f"conduit_kv.cli.{command}.load_vlm", load)
    return folder


def _pixels(number: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.asarray(picture(28, 42, number).convert("RGB"))


def test_a_folder_is_warmed_once_and_asked_later(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "cache")
    assert main(["store", "warm", str(pictures), "--store", store]) == 0
    out = capsys.readouterr()
    assert "3 pictures computed, 0 were there, 1 refused" in out.out
    assert main(["store", "warm", str(pictures), "--store", store]) == 0
    assert "0 pictures computed, 3 were there" in capsys.readouterr().out
    asked = ["ask", "What is this?", "-i", str(pictures / "b.png"), "--plan", "conduit:0.2"]
    assert main([*asked, "--store", store, "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr()
    assert "1 entry" in out.out
    assert "from disk" in out.out.replace("\n", " ")
    assert main(["store", "ls", store]) == 0
    assert "2 x" in capsys.readouterr().out
    assert main(["store", "stat", store]) == 0
    assert "3 entries" in capsys.readouterr().out
    assert main(["store", "verify", store]) == 0
    assert "3 entries, all good" in capsys.readouterr().out
    damaged = next((tmp_path / "cache" / "entries").glob("*/*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main(["store", "verify", store]) == 1
    assert "1 of 3 entries cannot be used" in capsys.readouterr().out
    assert main(["store", "verify", store, "--remove"]) == 1
    assert main(["store", "verify", store]) == 0
    capsys.readouterr()
    assert main(["store", "prune", store, "--max-bytes", "0B"]) == 0
    assert "2 entries removed" in capsys.readouterr().out
    assert main(["store", "clear", store, "--yes"]) == 0
    assert "0 entries removed" in capsys.readouterr().out


def test_a_folder_packed_once_is_asked_without_saying_how(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "cache")
    assert main(["store", "warm", str(pictures), "--store", store, "--held", "rtn:8"]) == 0
    assert main(["store", "stat", store]) == 0
    assert "held as rtn:8" in capsys.readouterr().out
    asked = ["ask", "What is this?", "-i", str(pictures / "b.png"), "--plan", "conduit:0.2"]
    asked += ["--store", store, "--max-new-tokens", "3"]
    assert main(asked) == 0
    assert "from disk" in capsys.readouterr().out.replace("\n", " ")
    assert main([*asked, "--held", "full"]) == 2
    assert "holds its entries as rtn:8" in capsys.readouterr().err
    for path in (tmp_path / "cache" / "entries").glob("*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    assert main(asked) == 0
    assert "is not used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["ls", "nowhere"], "is no store"),
        (["prune", "nowhere"], "say what to remove"),
        (["warm", "nowhere", "--store", "x"], "no such folder"),
    ),
)
def test_what_is_wrong_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", *arguments]) == 2
    assert message in capsys.readouterr().err
