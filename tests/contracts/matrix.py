"""Writes which family passed which method's contracts, for the README's support matrix.

A cell is a pair of family and method. Every test that has both as parameters counts for it; the
cell passes if all of them do. A run that leaves out some cells writes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.contracts.helpers import EVICT, FLOWS
from tests.tiny import FAMILY_NAMES

FOLDER = Path("out/support")
"""One file per release of Transformers, in the repository's root."""

METHODS = (*EVICT, *FLOWS)
"""Rows of the matrix."""

_outcomes: dict[tuple[str, str], list[bool]] = {}


def note(item: pytest.Item, report: pytest.TestReport) -> None:
    """Take down one test's outcome."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    cell = parameters.get("family"), parameters.get("method")
    tested = report.when == "call" and not report.skipped
    if cell[0] in FAMILY_NAMES and cell[1] in METHODS and (tested or report.failed):
        _outcomes.setdefault(cell, []).append(report.passed)


def write(folder: Path) -> None:
    """Write the file of this release, if every cell was tested."""
    cells = {
        family: {method: _outcomes.get((family, method), []) for method in METHODS}
        for family in FAMILY_NAMES
    }
    if not all(cells[family][method] for family in FAMILY_NAMES for method in METHODS):
        return
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "transformers": transformers.__version__,
        "families": {
            family: {
                method: {"passed": sum(tests), "failed": len(tests) - sum(tests)}
                for method, tests in methods.items()
            }
            for family, methods in cells.items()
        },
    }
    file = folder / f"transformers-{transformers.__version__}.json"
    file.write_text(json.dumps(content, indent=1) + "\n")
