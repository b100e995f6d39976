"""Let torchvision be imported where its compiled operators do not fit the installed torch.

TEST-ONLY. The video processors of Transformers need torchvision's transforms, which are plain
Python. The PyPI wheel beside a CPU build of torch fails on operators that it only annotates;
declaring them before the import is enough. Where the operators load, nothing is done.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []


def install() -> None:
    """Declare the missing operators; does nothing a second time, or without torchvision."""
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
