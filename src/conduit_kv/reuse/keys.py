"""What an entry is an entry of: everything that its K/V depend on, and nothing else.

K and V of an image are a function of the weights, of what the image encoder is given, and of the
tokens before the image in the prefill that made them. The key is the SHA-256 of exactly that, so
that two requests share an entry if and only if each would have computed the same one. The pixels
are those after the processor: another size, mode or processor setting changes them, or changes
nothing that the model sees.

K and V of the text that a prompt begins with are a function of the weights and of its tokens alone.
It is cut into blocks, each keyed by all tokens up to its end: prompts share as many blocks as they
have in common.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from conduit_kv.digests import update_digest, weights_known
from conduit_kv.families.piece import Piece
from conduit_kv.layout import Grid
from conduit_kv.reuse.entry import VERSION

TEXT_BLOCK = 32
"""Tokens of a block of text; what fills no block is not stored.

A pass of 135M parameters on one CPU core takes about 100 ms and 1 ms more per row: fewer rows would
hardly shorten it. Blocks of 16 take twice as long to store per token; blocks of 64 no less.
"""


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
        Digest of the processor's settings; empty where no processor is known, and for text.
    context : str
        Digest of the tokens that stood before the image when it was prefilled; of a block of text:
        of all tokens up to its end.
    content : str
        Digest of what the image encoder was given; empty for text.
    tokens : int
    grid : str
        Empty for text.
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

    @property
    def kind(self) -> Literal["image", "text"]:
        """What it is the key of."""
        return "image" if self.content else "text"

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
        name, dtype = _model_and_dtype(model)
        return Key(
            tenant=tenant,
            model=name,
            dtype=dtype,
            processor=processor,
            context=text.hexdigest(),
            content=content_digest(piece.inputs),
            tokens=len(piece),
            grid=grid_text(piece.grid),
        )

    @staticmethod
    def of_text(ids: Tensor, model: nn.Module, *, tenant: str = "") -> list[Key]:
        """The keys of the whole blocks of a prompt's first tokens ``ids`` ``[n]``, in order."""
        name, dtype = _model_and_dtype(model)
        digest, keys = hashlib.sha256(), []
        for start in range(0, len(ids) - TEXT_BLOCK + 1, TEXT_BLOCK):
            digest.update(json.dumps(ids[start : start + TEXT_BLOCK].tolist()).encode())
            keys.append(Key(tenant, name, dtype, "", digest.hexdigest(), "", TEXT_BLOCK, ""))
        return keys


def _model_and_dtype(model: nn.Module) -> tuple[str, str]:
    return f"{type(model).__name__} {fingerprint(model)}", str(next(model.parameters()).dtype)


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
