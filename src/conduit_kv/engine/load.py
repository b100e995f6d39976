"""Loading a model: by name, from a folder, or the embedded one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import ModelError

_DTYPES = {
    "auto": "auto",
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def load(
    model: str | Path,
    *,
    device: str | None = None,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    **options: Any,
) -> VLM:
    """Load a vision-language model with its processor.

    Parameters
    ----------
    model : str or Path
        ``"embedded"``, a name on the hub, or a local folder.
    device : str, optional
        ``"cpu"``, ``"cuda"``, ...; CUDA where there is one, by default.
    dtype : str or torch.dtype
        ``"auto"`` takes the weights' own.
    device_map
        As in Transformers, to spread the layers over several devices; needs accelerate.
    **options
        For ``from_pretrained``, for example ``quantization_config``.

    Raises
    ------
    ModelError
        If the model is not there, is no vision-language model, or is of an unknown family.
    """
    if isinstance(dtype, str):
        if dtype not in _DTYPES:
            raise ModelError(f"unknown dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
        dtype = _DTYPES[dtype]  # type: ignore[assignment]
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device='cuda' was asked for, but PyTorch sees no CUDA device")
    if str(model) == "embedded":
        from conduit_kv.embedded import load_embedded

        if device_map is not None or options:
            raise ModelError("the embedded model takes device and dtype only")
        loaded, processor = load_embedded(dtype=dtype, device=device)
        return VLM(loaded, processor, "embedded")
    return _from_pretrained(str(model), device, dtype, device_map, options)


def _from_pretrained(
    name: str, device: str, dtype: Any, device_map: Any, options: dict[str, Any]
) -> VLM:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ModelError(f"{name}: no such folder")
    path = str(Path(name).expanduser()) if name.startswith("~") else name
    try:
        processor = AutoProcessor.from_pretrained(path)
        model = AutoModelForImageTextToText.from_pretrained(
            path, dtype=dtype, device_map=device_map, **options
        )
    except ImportError as error:
        raise ModelError(f"{name} needs a package that is not installed: {error}") from None
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{name} cannot be loaded: {first}") from error
    if device_map is None and not getattr(model, "is_quantized", False):
        model = model.to(device)
    return VLM(model, processor, name)
