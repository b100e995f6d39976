"""Let torchvision be imported where its compiled operators do not fit the installed torch.

TEST-ONLY. The video processors of Transformers need torchvision's transforms, which are plain
Python. The PyPI wheel beside a CPU build of torch fails on operators that it only annotates;
declaring them before the import is enough. Where the operators load, nothing is done.

A torchvision that does not fit would break every import of Transformers, so ``make test`` installs
it into a folder of its own, ``torchvision/`` in the environment, which only this shim looks into.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
FOLDER = Path(sys.prefix) / "torchvision"
"""Where the tests' own torchvision lies."""
_declared: list[torch.library.Library] = []


def install() -> None:
    """Declare the missing operators; does nothing a second time, or without torchvision."""
    if importlib.util.find_spec("torchvision") is None and FOLDER.is_dir():
        sys.path.append(str(FOLDER))
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared:
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
            return
        except OSError:
            continue
    fragment = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        fragment.define(schema)
    _declared.append(fragment)
