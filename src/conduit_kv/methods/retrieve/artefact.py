"""The learned token of a model: read from a file, or the one that is shipped for it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from conduit_kv.artefact import Artefact, load_artefact, weights_digest
from conduit_kv.errors import PlanError

KIND = "retoken"
SHIPPED = Path(__file__).parents[2] / "embedded" / "retoken.safetensors"
"""The built-in model's token."""


@dataclass(frozen=True)
class ReTokenArtefact:
    """A learned token, ready to be asked with.

    Attributes
    ----------
    embedding : Tensor
        ``[D]`` fp32.
    temperature : Tensor
        ``[l, G, H/G]`` fp32, the logarithm of each scored layer's and query head's factor.
    layers : tuple of int
        The scored layers.
    space : {"value", "key"}
    """

    embedding: Tensor
    temperature: Tensor
    layers: tuple[int, ...]
    space: Literal["value", "key"]

    @staticmethod
    def of(artefact: Artefact, text_model: nn.Module) -> ReTokenArtefact:
        """On the device of a text model."""
        device = next(text_model.parameters()).device
        return ReTokenArtefact(
            artefact.tensors["embedding"].to(device),
            artefact.tensors["temperature"].to(device="cpu"),
            tuple(artefact.config["scored_layers"]),
            artefact.config["space"],
        )


_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, str], ReTokenArtefact]]
_known = weakref.WeakKeyDictionary()


def artefact_for(path: str, text_model: nn.Module) -> ReTokenArtefact:
    """The learned token in a file, or with an empty path the one that is shipped for this model.

    Raises
    ------
    PlanError
        If there is none for this very model.
    InputError
        If the file cannot be read.
    """
    key = path, weights_digest(text_model)
    found = _known.setdefault(text_model, {})
    if key not in found:
        artefact = load_artefact(path or SHIPPED)
        if not path and artefact.model != key[1]:
            raise PlanError(
                "no learned token is shipped for this model: train one with `conduit-kv fit "
                "retoken --model MODEL --data board --out FILE`, then write retoken:392(artefact="
                "FILE)"
            )
        artefact.check(KIND, text_model, path or "the artefact")
        found[key] = ReTokenArtefact.of(artefact, text_model)
    return found[key]
