"""Writes the README's support matrix from what the contract tests left in ``out/support``.

>>> python -m tests.support_matrix          # or --check: fails if the README is behind
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- support-matrix -->", "<!-- /support-matrix -->"
NAMES = {
    "llava": "LLaVA-1.5",
    "llava-next": "LLaVA-NeXT",
    "llava-onevision": "LLaVA-OneVision",
    "qwen2-vl": "Qwen2-VL",
    "qwen2.5-vl": "Qwen2.5-VL",
    "qwen3-vl": "Qwen3-VL",
    "internvl3": "InternVL3",
    "smolvlm": "SmolVLM",
    "idefics3": "Idefics3",
}


def table(results: list[dict[str, Any]]) -> str:
    """The matrix of one or more releases: a row per method, a column per family.

    Parameters
    ----------
    results : list of dict
        What ``tests/contracts/matrix.py`` writes, one per release.
    """
    results = sorted(results, key=lambda result: _release(result["transformers"]))
    releases = [result["transformers"] for result in results]
    families = list(results[0]["families"])
    methods = list(results[0]["families"][families[0]])
    tests = sum(
        cell["passed"] + cell["failed"]
        for result in results
        for cells in result["families"].values()
        for cell in cells.values()
    )
    lines = [
        f"Transformers {' and '.join(releases)}; {tests} tests of the contracts, on tiny random "
        "models of the real classes. ✓: all pass with each release.",
        "",
        "| | " + " | ".join(NAMES.get(family, family) for family in families) + " |",
        "|---|" + ":-:|" * len(families),
    ]
    for method in methods:
        cells = [_cell([r["families"][family][method] for r in results], releases)
                 for family in families]  # fmt: skip
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(outcomes: list[dict[str, int]], releases: list[str]) -> str:
    good = [release for release, each in zip(releases, outcomes, strict=True) if not each["failed"]]
    if len(good) == len(releases):
        return "✓"
    return f"{' '.join(good)} only" if good else "✗"


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def replaced(text: str, matrix: str) -> str:
    """``text`` with ``matrix`` between its marks.

    Raises
    ------
    SystemExit
        If the marks are missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README.md has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{matrix}\n{END}{after}"


def main(arguments: list[str], root: Path = ROOT) -> int:
    files = sorted((root / "out" / "support").glob("transformers-*.json"))
    if not files:
        raise SystemExit("out/support is empty: run make test and make test-5.19 first")
    readme = root / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = replaced(old, table([json.loads(file.read_text()) for file in files]))
    if "--check" in arguments:
        if old != new:
            print("README.md is behind the tests: run python -m tests.support_matrix")
        return int(old != new)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
