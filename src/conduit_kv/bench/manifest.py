"""What a figure depends on, written beside it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import conduit_kv

if TYPE_CHECKING:
    from conduit_kv.engine.vlm import VLM

__all__ = ["code_digest", "identity", "machine", "weights_digest"]

_SAMPLES = 64
"""Values of each parameter that go into the digest of the weights."""
_NOT_COMPUTING = ("cli", "bench", "report", "embedded", "picture.py", "extras.py")
"""Parts of the package that no answer passes through (the embedded weights have their digest)."""


def identity(vlm: VLM, seed: int) -> dict[str, Any]:
    """Everything that can change an answer: results that differ in it are never mixed.

    Parameters
    ----------
    vlm : VLM
    seed : int
        Of the tasks' items.
    """
    config = vlm.model.config.get_text_config()
    return {
        "versions": {
            "conduit_kv": conduit_kv.__version__,
            "torch": str(torch.__version__),
            "transformers": importlib.metadata.version("transformers"),
            "pillow": importlib.metadata.version("pillow"),
        },
        "code": code_digest(),
        "model": {
            "name": vlm.name,
            "family": vlm.family.name,
            "weights": weights_digest(vlm),
            "dtype": str(vlm.model.dtype).removeprefix("torch."),
            "device": vlm.model.device.type,
            "layers": config.num_hidden_layers,
            "positions": getattr(config, "max_position_embeddings", None),
        },
        "prompt_template": _template_digest(vlm),
        "pixels": _pixels(vlm),
        "seed": seed,
    }


def machine(vlm: VLM) -> dict[str, Any]:
    """What the seconds depend on besides."""
    device = vlm.model.device
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def weights_digest(vlm: VLM) -> str:
    """SHA-256 over name, shape and evenly spaced values of every parameter and buffer."""
    digest = hashlib.sha256()
    state = [*vlm.model.named_parameters(), *vlm.model.named_buffers()]
    for name, tensor in sorted(state, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        digest.update(flat[::step].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()


@functools.cache
def code_digest() -> str:
    """SHA-256 over the package's source files through which an answer passes.

    Taken once per process, near to when they were imported.
    """
    root = Path(conduit_kv.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        part = path.relative_to(root)
        if part.parts[0] in _NOT_COMPUTING and part.as_posix() != "bench/protocols.py":
            continue
        digest.update(part.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _template_digest(vlm: VLM) -> str:
    template = getattr(vlm.processor, "chat_template", None) or vlm.tokenizer.chat_template
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _pixels(vlm: VLM) -> dict[str, Any]:
    """The image processor's settings, as plain data."""
    processor = getattr(vlm.processor, "image_processor", None)
    if processor is None:
        return {}
    plain: dict[str, Any] = json.loads(json.dumps(processor.to_dict(), default=str))
    return {key: value for key, value in sorted(plain.items()) if value is not None}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _memory() -> int | None:
    if sys.platform == "win32":
        return None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
