"""Whatever is wrong ends in one clear line on stderr and exit code 2."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.conftest import Result
from tests.tiny.parts import picture

Run = Callable[..., Result]


def save(path: Path, image: Image.Image, **options: object) -> Path:
    image.save(path, **options)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return save(tmp_path / "good.png", picture(28, 28))


def truncated(path: Path, form: str) -> Path:
    stream = io.BytesIO()
    picture(200, 200).save(stream, form)
    path.write_bytes(stream.getvalue()[: len(stream.getvalue()) // 2])
    return path


def zero_bytes(folder: Path) -> Path:
    (folder / "zero.png").touch()
    return folder / "zero.png"


def no_image(folder: Path) -> Path:
    (folder / "text.png").write_text("this is no image")
    return folder / "text.png"


def animated(folder: Path) -> Path:
    frames = [picture(20, 20, seed) for seed in range(3)]
    return save(folder / "a.gif", frames[0], save_all=True, append_images=frames[1:])


BAD_IMAGES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (lambda folder: folder / "missing.png", "no such file"),
    "folder": (lambda folder: folder, "is a folder"),
    "no image": (no_image, "not an image"),
    "0 bytes": (zero_bytes, "empty"),
    "truncated PNG": (lambda folder: truncated(folder / "cut.png", "PNG"), "damaged"),
    "truncated JPEG": (lambda folder: truncated(folder / "cut.jpg", "JPEG"), "damaged"),
    "1x1": (lambda f: save(f / "1.png", Image.new("RGB", (1, 1))), "1x1"),
    "10,000x10": (lambda f: save(f / "l.png", Image.new("RGB", (10_000, 10))), "10000x10"),
    "CMYK": (lambda f: save(f / "c.jpg", Image.new("CMYK", (30, 30))), "CMYK"),
    "16 bit": (lambda f: save(f / "16.png", Image.new("I;16", (30, 30))), "I;16"),
    "animated": (animated, "animated"),
}


def check(result: Result, says: str) -> None:
    assert result.code == 2
    assert result.out == ""
    (line,) = result.err.splitlines()
    assert line.startswith("conduit-kv: ")
    assert says in line
    assert "Traceback" not in line


@pytest.mark.parametrize("name", list(BAD_IMAGES))
def test_bad_image(name: str, run: Run, loads: list[str], tmp_path: Path) -> None:
    make, says = BAD_IMAGES[name]
    check(run("ask", "What is this?", "-i", make(tmp_path)), says)
    assert loads == []  # before the model is loaded


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("nothing:0.2", "unknown method"),
        ("tgv-kw:0.2", "did you mean tgv-kv"),
        ("tgv-kv:0", "at least 1"),
        ("tgv-kv:0.0", "share in (0, 1]"),
        ("tgv-kv:1.7", "share in (0, 1]"),
        ("tgv-kv:-0.5", "budget"),
        ("tgv-kv", "needs a budget"),
        ("tgv-kv:0.2(rows=none)", "rows"),
        ("tgv-kv:0.2 + snapkv:0.2", "stage evict"),
        ("", "empty"),
    ],
)
def test_bad_plan(plan: str, says: str, run: Run, loads: list[str], good: Path) -> None:
    check(run("ask", "What is this?", "-i", good, "--plan", plan), says)
    assert loads == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-new-tokens", "0"], "at least one"),
        (["--max-new-tokens", "many"], "max-new-tokens"),
        (["--picture", "missing/a.png"], "no folder"),
        (["--picture", "a.txt"], ".png"),
        (["--nothing"], "--nothing"),
        (["--threads", "0"], "threads"),
        (["--store", "new"], "reuses no images"),
        (["--store", "new", "--plan", "conduit:1.0"], "leave the store out"),
        (["--tenant", "me", "--plan", "conduit:0.1"], "add --store"),
        (["--held", "kivi:4", "--plan", "conduit:0.1"], "add --store"),
        (["--store", "new", "--held", "int3", "--plan", "conduit:0.1"], "entries are held"),
        (["--plan", "rekv:400 + windowquant:3.17"], "depend on the question"),
    ],
)
def test_bad_option(options: list[str], says: str, run: Run, loads: list[str], good: Path) -> None:
    check(run("ask", "What is this?", "-i", good, *options), says)
    assert loads == []


def test_bad_prompt(run: Run, loads: list[str], good: Path) -> None:
    check(run("ask", " please" * 5000, "-i", good), "too long")
    check(run("ask", " please" * 4050, "-i", good, "--max-new-tokens", 100), "too long")
    check(run("ask", " "), "empty")
    assert run("ask").code == 2


def test_bad_model(run: Run, tmp_path: Path) -> None:
    check(run("ask", "What?", "--model", tmp_path / "missing"), "no such folder")
    check(run("selftest", "--model", tmp_path / "missing"), "no such folder")
    check(run("ask", "What?", "--dtype", "float7"), "float7")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a task"),
        (["--task", "bord"], "unknown task"),
        (["--task", "board", "--plan", "tgv-kv:2.5"], "share"),
        (["--task", "board", "--n", "0"], "at least one item"),
        (["--task", "board", "--control", "none"], "unknown control"),
        (["--task", "board", "--on-change", "ask"], "stop, restart, keep"),
        (["--task", "board", "--json", "missing/out.json"], "no folder"),
        (["--task", "board", "--against", "tgv"], "unknown method"),
        (["--task", "haystack-1000"], "number of images"),
    ],
)
def test_bad_bench(arguments: list[str], says: str, run: Run, loads: list[str]) -> None:
    check(run("bench", *arguments), says)
    assert loads == []


def test_unknown_command(run: Run) -> None:
    check(run("asks"), "asks")
    check(run("methods", "tgv"), "unknown method")
    assert run("setup", "everything").code == 2
