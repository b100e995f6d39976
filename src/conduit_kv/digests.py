"""SHA-256 of tensors: of what stands in a file, and of a model's weights."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_known: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, str]]]
_known = weakref.WeakKeyDictionary()


def update_digest(digest: Any, name: str, tensor: Tensor) -> None:
    """Feed a tensor to a digest: name, dtype, shape and bytes."""
    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
    if tensor.numel():
        flat: Any = tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy()
        digest.update(flat)


def checksum(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Of a file's tensors and its header, but for the header's own ``checksum``."""
    digest = hashlib.sha256()
    signed = {name: value for name, value in header.items() if name != "checksum"}
    digest.update(json.dumps(signed, sort_keys=True).encode())
    for name in sorted(tensors):
        update_digest(digest, name, tensors[name])
    return digest.hexdigest()


def weights_known(
    module: nn.Module, kind: str, weights: Iterable[Tensor], compute: Callable[[], str]
) -> str:
    """What ``compute`` says of a module's weights: asked once per ``kind``, and again when one of
    them was replaced or changed in place."""
    state = tuple((id(t), t.data_ptr(), -1 if t.is_inference() else t._version) for t in weights)
    found = _known.setdefault(module, {})
    if kind not in found or found[kind][0] != state:
        found[kind] = state, compute()
    return found[kind][1]
