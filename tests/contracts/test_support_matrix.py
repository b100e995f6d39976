"""The README's table says what the tests found, and nothing else."""

from __future__ import annotations

import json

import pytest

from tests import support_matrix


def result(release, **failed):
    cells = {
        method: {"passed": 3, "failed": failed.get(method, 0)} for method in ("snapkv", "tova")
    }
    return {"transformers": release, "families": {"llava": cells, "qwen3-vl": cells}}


def test_a_tick_needs_every_release():
    found = support_matrix.table([result("5.24.0"), result("5.9.0", tova=1)])
    assert "Transformers 5.9.0 and 5.24.0; 25 tests" not in found
    assert "Transformers 5.9.0 and 5.24.0; 26 tests" in found
    assert "| | LLaVA-1.5 | Qwen3-VL |" in found
    assert "| `snapkv` | ✓ | ✓ |" in found
    assert "| `tova` | 5.24.0 only | 5.24.0 only |" in found
    assert "| `tova` | ✗ | ✗ |" in support_matrix.table([result("5.24.0", tova=2)])


def test_the_readme_is_rewritten_between_its_marks(tmp_path, capsys):
    folder = tmp_path / "out" / "support"
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- support-matrix -->\nold\n<!-- /support-matrix -->\nb\n")
    with pytest.raises(SystemExit, match="empty"):
        support_matrix.main([], tmp_path)
    folder.mkdir(parents=True)
    (folder / "transformers-5.24.0.json").write_text(json.dumps(result("5.24.0")))
    assert support_matrix.main(["--check"], tmp_path) == 1
    assert support_matrix.main([], tmp_path) == 0
    once = readme.read_text()
    assert support_matrix.main([], tmp_path) == 0
    assert support_matrix.main(["--check"], tmp_path) == 0
    assert readme.read_text() == once
    assert once.startswith("a\n<!-- support-matrix -->\nTransformers 5.24.0")
    assert once.endswith("|\n<!-- /support-matrix -->\nb\n") and "old" not in once
    readme.write_text("no marks")
    with pytest.raises(SystemExit, match="support-matrix"):
        support_matrix.main([], tmp_path)
