"""Artefacts: what was fitted for one model, in one file that no other model will take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conduit_kv.digests import update_digest, weights_known
from conduit_kv.errors import InputError, PlanError

__all__ = ["Artefact", "load_artefact", "weights_digest"]

FORMAT = 1
_KEY = "conduit-artefact"


def weights_digest(text_model: nn.Module) -> str:
    """SHA-256 over a text stack's weights, the same whether they are loaded in fp32 or bf16.

    Read once, and again when a weight was replaced or changed in place.
    """
    named = sorted(text_model.named_parameters(), key=lambda pair: pair[0])

    def read() -> str:
        digest = hashlib.sha256()
        for name, tensor in named:
            # bf16 weights are fp32 ones rounded: what is rounded alike is the same model.
            rounds = tensor.is_floating_point() and tensor.element_size() > 1
            rounded = tensor.detach().to(torch.bfloat16) if rounds else tensor.detach()
            update_digest(digest, name, rounded)
        return digest.hexdigest()

    return weights_known(text_model, "artefact", (tensor for _, tensor in named), read)


@dataclass(frozen=True)
class Artefact:
    """What was fitted for one model.

    Attributes
    ----------
    kind : str
        The method that it is for, ``"retoken"`` for instance.
    model : str
        :func:`weights_digest` of the text stack that it was fitted on.
    layers : int
        Decoder layers of that model.
    config : mapping
        Plain data: how it was fitted, and what the method must know to use it.
    tensors : mapping
    """

    kind: str
    model: str
    layers: int
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = field(repr=False)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, in one piece."""
        from safetensors.torch import save_file

        path = Path(path)
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()
        }
        header = {
            "format": FORMAT,
            "kind": self.kind,
            "model": self.model,
            "layers": self.layers,
            "config": dict(self.config),
            "checksum": _checksum(tensors),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        save_file(tensors, str(part), metadata={_KEY: json.dumps(header, sort_keys=True)})
        part.replace(path)

    def check(self, kind: str, text_model: nn.Module, where: str = "the artefact") -> None:
        """Raise PlanError unless it is for this method and this very model."""
        if self.kind != kind:
            raise PlanError(f"{where} is for {self.kind}, not for {kind}")
        if self.model != weights_digest(text_model):
            raise PlanError(
                f"{where} was fitted on another model (weights {self.model[:12]}): fit one on this "
                f"model with `conduit-kv fit {kind}`"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors: process memory, not a request's."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def load_artefact(path: str | Path) -> Artefact:
    """Read a file that ``conduit-kv fit`` wrote.

    Raises
    ------
    InputError
        If it is not there, is not an artefact, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"{path}: no such artefact; `conduit-kv fit` writes one")
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise InputError(f"{path} is damaged or no artefact: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise InputError(f"{path} is not an artefact of this version: fit it again")
    if header["checksum"] != _checksum(tensors):
        raise InputError(f"{path} is damaged: its contents do not fit its checksum")
    return Artefact(header["kind"], header["model"], header["layers"], header["config"], tensors)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest: Any = hashlib.sha256()
    for name in sorted(tensors):
        update_digest(digest, name, tensors[name])
    return str(digest.hexdigest())
