"""What an entry is an entry of: everything that its K/V depend on, and nothing else.

K and V of an image are a function of the weights, of what the image encoder is given, and of the
tokens before the image in the prefill that made them. The key is the SHA-256 of exactly that, so
that two requests share an entry if and only if each would have computed the same one. The pixels
are those after the processor: another size, mode or processor setting changes them, or changes
nothing that the model sees.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from conduit_kv.digests import update_digest, weights_known
from conduit_kv.families.piece import Piece
from conduit_kv.layout import Grid
from conduit_kv.reuse.entry import VERSION


@dataclass(frozen=True)
class Key:
    """Everything that an entry depends on.

    Attributes
    ----------
    tenant : str
        Whose entry it is; tenants never share entries unless they share the name.
    model : str
        Class and fingerprint of the weights.
    dtype : str
        Of K and V.
    processor : str
        Digest of the processor's settings; empty where no processor is known.
    context : str
        Digest of the tokens that stood before the image when it was prefilled.
    content : str
        Digest of what the image encoder was given.
    tokens : int
    grid : str
    version : int
    """

    tenant: str
    model: str
    dtype: str
    processor: str
    context: str
    content: str
    tokens: int
    grid: str
    version: int = VERSION

    @property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @staticmethod
    def of(
        piece: Piece,
        prefix: Sequence[int],
        model: nn.Module,
        *,
        processor: str = "",
        tenant: str = "",
    ) -> Key:
        """The key of one image prefilled alone after the tokens ``prefix``."""
        text = hashlib.sha256()
        for part in (list(prefix), piece.span.tolist()):
            text.update(json.dumps(part).encode())
        parameter = next(model.parameters())
        return Key(
            tenant=tenant,
            model=f"{type(model).__name__} {fingerprint(model)}",
            dtype=str(parameter.dtype),
            processor=processor,
            context=text.hexdigest(),
            content=content_digest(piece.inputs),
            tokens=len(piece),
            grid=grid_text(piece.grid),
        )


def grid_text(grid: Grid) -> str:
    """A grid as text, views included."""
    return json.dumps(asdict(grid), sort_keys=True)


def content_digest(inputs: Mapping[str, Any]) -> str:
    """SHA-256 over all that an encoder is given: names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(inputs):
        value = inputs[name]
        if isinstance(value, Tensor):
            update_digest(digest, name, value)
        else:
            digest.update(f"{name} {value!r};".encode())
    return digest.hexdigest()


def processor_digest(processor: Any) -> str:
    """SHA-256 over the settings of a processor's image and video parts."""
    settings = []
    for name in ("image_processor", "video_processor"):
        part = getattr(processor, name, None)
        if part is not None:
            settings.append((name, type(part).__name__, part.to_dict()))
    text = json.dumps(settings, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over all weights of a model.

    Read once, and again when a weight was replaced or changed in place.
    """
    named = [*model.named_parameters(), *model.named_buffers()]

    def read() -> str:
        digest = hashlib.sha256()
        for name, tensor in named:
            update_digest(digest, name, tensor.detach())
        return digest.hexdigest()

    return weights_known(model, "fingerprint", (tensor for _, tensor in named), read)
