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

from conduit_kv.digests import checksum, update_digest, weights_known
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
        }
        header["checksum"] = checksum(header, tensors)
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


_loaded: dict[tuple[str, int, int], Artefact] = {}


def load_artefact(path: str | Path, model: Any = None) -> Artefact:
    """Read a file that ``conduit-kv fit`` wrote; once, as long as it does not change.

    Parameters
    ----------
    path : str or Path
    model : PreTrainedModel or VLM, optional
        Raise unless it was fitted on this model's weights.

    Raises
    ------
    InputError
        If it is not there, is not an artefact, or is damaged.
    PlanError
        If it belongs to other weights.
    """
    path = Path(path).expanduser()
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(
            f"{path}: no artefact can be read there ({error.strerror}); `conduit-kv fit` writes one"
        ) from None
    known = (str(path.resolve()), status.st_mtime_ns, status.st_size)
    if known not in _loaded:
        _loaded[known] = _read(path)
    artefact = _loaded[known]
    if model is not None:
        from conduit_kv.families import family_of

        plain = model.model if hasattr(model, "processor") else model
        artefact.check(artefact.kind, family_of(plain).text_model(plain), str(path))
    return artefact


def _read(path: Path) -> Artefact:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise InputError(f"{path} is damaged or no artefact: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise InputError(f"{path} is not an artefact of this version: fit it again")
    if header.get("checksum") != checksum(header, tensors):
        raise InputError(f"{path} is damaged: its contents do not fit its checksum")
    return Artefact(header["kind"], header["model"], header["layers"], header["config"], tensors)
