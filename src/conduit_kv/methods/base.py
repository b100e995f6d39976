"""What every method is: a frozen dataclass whose fields are its hyper-parameters."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from conduit_kv.budget import Budget
from conduit_kv.errors import PlanError

STAGES = ("reuse", "reduce", "route", "evict", "hold", "retrieve")
"""The six places where a method can act, in the order of a visual token's life."""


@dataclass(frozen=True)
class Method:
    """Base of all methods.

    A method's name, stage, paper and what it does while decoding are class attributes; its fields
    are the hyper-parameters that a plan's text may set by name.
    """

    name: ClassVar[str]
    stage: ClassVar[str]
    paper: ClassVar[str] = ""
    in_decode: ClassVar[str] = "nothing more is evicted"

    def __post_init__(self) -> None:
        """Check the fields; subclasses add their own checks and call this one."""

    @property
    def is_identity(self) -> bool:
        """Whether this setting does nothing, so that the plain path is taken."""
        return False

    def replace(self, **changes: Any) -> typing.Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        changed = []
        budget = ""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Budget):
                budget = f":{value}"
            elif value != field.default:
                changed.append(f"{field.name}={value}")
        return self.name + budget + (f"({', '.join(changed)})" if changed else "")


_REGISTRY: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Class decorator: make a method known to plans under its ``name``."""
    if method.name in _REGISTRY:
        raise ValueError(f"two methods are named {method.name!r}")
    if method.stage not in STAGES:
        raise ValueError(f"{method.name}: unknown stage {method.stage!r}")
    _REGISTRY[method.name] = method
    return method


def registry() -> dict[str, type[Method]]:
    """All registered methods by name."""
    return dict(_REGISTRY)


def read_field(method: type[Method], key: str, text: str) -> Any:
    """The value of field ``key`` of ``method`` from plan text.

    Raises
    ------
    PlanError
        If there is no such field or the text does not fit its type.
    """
    hints = typing.get_type_hints(method)
    fields = {field.name for field in dataclasses.fields(method)}
    if key not in fields:
        raise PlanError(f"{method.name} has no option {key!r}; it has {', '.join(sorted(fields))}")
    hint = hints[key]
    try:
        return _convert(hint, text)
    except (ValueError, PlanError) as error:
        raise PlanError(f"{method.name}({key}={text}): {error}") from None


def _convert(hint: Any, text: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        if text not in (choices := [str(c) for c in typing.get_args(hint)]):
            raise ValueError(f"choose one of {', '.join(choices)}")
        return next(c for c in typing.get_args(hint) if str(c) == text)
    if origin in (typing.Union, types.UnionType):
        parts = typing.get_args(hint)
        if type(None) in parts and text.lower() == "none":
            return None
        for part in parts:
            if part is not type(None):
                try:
                    return _convert(part, text)
                except ValueError:
                    continue
        raise ValueError(f"{text!r} does not fit")
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        return tuple(_convert(inner, part) for part in text.strip("[]").replace(";", ",").split(","))
    converters: dict[Any, Callable[[str], Any]] = {
        int: int,
        float: float,
        str: str,
        Budget: Budget.parse,
    }
    if hint is bool:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError("write true or false")
        return text.lower() in ("true", "yes", "1")
    if hint in converters:
        return converters[hint](text)
    raise ValueError(f"cannot be set from text (type {hint})")
