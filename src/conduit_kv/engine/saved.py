"""A conversation as a file: tensors in safetensors, everything else as JSON in its header.

Objects of this package are written by their attributes and made again without running any of their
code; nothing else can come out of a file.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import types
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from conduit_kv.cache.cache import borrowed
from conduit_kv.digests import checksum
from conduit_kv.errors import InputError, PlanError
from conduit_kv.plan import Plan
from conduit_kv.reuse.keys import fingerprint

if TYPE_CHECKING:
    from conduit_kv.engine.runner import Runner
    from conduit_kv.engine.session import Session
    from conduit_kv.reuse.store import Store

_FORMAT, _VERSION = "conduit-kv session", "1"
_PACKAGE = "conduit_kv."
_OURS = ("cache", "budget", "layout", "methods", "stages", "hold", "codecs", "attention")
"""Packages and modules whose objects a file may hold."""


def save_state(path: str | Path, session: Session) -> None:
    """Write a conversation: see :meth:`Session.save`."""
    from safetensors.torch import save

    state = session.state
    if state is None:
        raise InputError("nothing has been asked yet: there is nothing to save")
    cache = state.cache
    if cache.retrieval is not None:
        raise InputError(
            f"a conversation under {cache.plan} is not saved: its images are in the store, and "
            "every question sees them anew"
        )
    writer = _Writer(skip={id(borrowed(cache)): "cache", id(cache.shelf): "shelf"})
    content = {
        "layers": [writer.value(_state_of(layer)) for layer in cache.layers],
        "progress": writer.value(cache.progress),
        "stages": [writer.value(vars(stage)) for stage in cache.stages],
        "logits": writer.value(state.logits),
        "ids": state.ids,
        "messages": session.messages,
        "pending": session._pending,
        "seconds": state.seconds,
    }
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": fingerprint(session.vlm.model),
        "plan": str(cache.plan),
        "content": json.dumps(content),
    }
    header["checksum"] = checksum(header, writer.tensors)
    data = save(writer.tensors, metadata=header)
    target = Path(path).expanduser()
    waiting = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        handle = os.open(waiting, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(waiting, target)
    except OSError as error:
        waiting.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def load_state(vlm: Runner, path: str | Path, store: Store | None) -> Session:
    """A conversation from a file: see :meth:`Session.load`."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from conduit_kv.engine.compress import Run
    from conduit_kv.engine.runner import State
    from conduit_kv.engine.session import Session

    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])["__metadata__"]
        if header["format"] != _FORMAT:
            raise KeyError("format")
        version = header["version"]
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is no saved conversation, or is damaged") from None
    if version != _VERSION:
        raise InputError(f"{path} has version {version} of the format; this is {_VERSION}")
    try:
        tensors = load(data)
        if checksum(header, tensors) != header["checksum"]:
            raise ValueError("its checksum does not fit")
        content = json.loads(header["content"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError(f"{path} is damaged: {error}") from None
    if header["model"] != fingerprint(vlm.model):
        raise InputError(f"{path} was saved on other weights than those of {vlm.name}")
    plan = Plan.parse(header["plan"])
    shelf = vlm.shelf(store) if plan.reuse and not plan.reuse.is_identity else None
    cache = Run(vlm.model, vlm.family, plan, shelf=shelf).new_cache()
    reader = _Reader(tensors, vlm.model.device, {"cache": borrowed(cache), "shelf": cache.shelf})
    progress = reader.value(content["progress"])
    cache.progress = progress
    for layer, saved in zip(cache.layers, content["layers"], strict=True):
        layer.__dict__.update(reader.value(saved), progress=progress)
    for stage, saved in zip(cache.stages, content["stages"], strict=True):
        stage.__dict__.update(reader.value(saved))
    session = Session(vlm, plan, None, store)
    session.state = State(
        cache, reader.value(content["logits"]), content["ids"], content["seconds"]
    )
    session.messages, session._pending = content["messages"], content["pending"]
    return session


def _state_of(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if name != "progress"}


class _Writer:
    """Turns objects into JSON, and their tensors into a dictionary beside it."""

    def __init__(self, skip: dict[int, str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._skip = skip
        self._known: dict[int, tuple[str, Tensor]] = {}

    def value(self, value: Any) -> Any:
        """JSON for a value.

        Raises
        ------
        PlanError
            If it cannot be written.
        """
        if id(value) in self._skip and value is not None:
            return {"given": self._skip[id(value)]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": [self._tensor(value), value.device.type == "cpu"]}
        if isinstance(value, torch.dtype | torch.device):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, list | tuple | set | frozenset):
            return {type(value).__name__: [self.value(each) for each in value]}
        if isinstance(value, dict | types.MappingProxyType):
            # Functions are left out: a new cache has its own.
            kept = [(key, each) for key, each in value.items() if not _is_function(each)]
            return {"dict": [[self.value(key), self.value(each)] for key, each in kept]}
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if not _is_ours(name):
            raise PlanError(f"a conversation that holds a {name} cannot be saved")
        return {"object": name, "state": self.value(vars(value))}

    def _tensor(self, tensor: Tensor) -> str:
        known = self._known.get(id(tensor))
        if known is None:
            name = f"t{len(self.tensors)}"
            self.tensors[name] = tensor.detach().cpu().contiguous().clone()
            known = self._known[id(tensor)] = name, tensor
        return known[0]


class _Reader:
    """The other way round."""

    def __init__(
        self, tensors: dict[str, Tensor], device: torch.device, given: dict[str, Any]
    ) -> None:
        self._tensors, self._device, self._given = tensors, device, given

    def value(self, data: Any) -> Any:
        """The value of its JSON."""
        if not isinstance(data, dict):
            return data
        if "object" in data:
            return self._object(data["object"], self.value(data["state"]))
        ((kind, content),) = data.items()
        if kind == "given":
            return self._given[content]
        if kind == "tensor":
            name, on_cpu = content
            return self._tensors[name] if on_cpu else self._tensors[name].to(self._device)
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "device":
            return torch.device(content)
        if kind == "dict":
            return {self.value(key): self.value(each) for key, each in content}
        make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make(self.value(each) for each in content)

    @staticmethod
    def _object(name: str, state: dict[str, Any]) -> Any:
        if not _is_ours(name):
            raise InputError(f"a saved conversation cannot hold a {name}")
        module, _, kind = name.rpartition(".")
        made: Any = object.__new__(getattr(importlib.import_module(module), kind))
        made.__dict__.update(state)
        return made


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.MethodType | functools.partial)


def _is_ours(name: str) -> bool:
    return name.startswith(_PACKAGE) and name.split(".")[1] in _OURS
