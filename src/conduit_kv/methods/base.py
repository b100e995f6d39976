"""What every method is: a frozen dataclass whose fields are its hyper-parameters."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from conduit_kv.budget import Budget
from conduit_kv.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

STAGES = ("reuse", "reduce", "route", "evict", "hold", "retrieve")
"""The six places where a method can act, in the order of a visual token's life."""


@dataclass(frozen=True)
class Method:
    """Base of all methods.

    A method's name, stage, paper and what it does while decoding are class attributes; its fields
    are the hyper-parameters that a plan's text may set by name.

    Attributes
    ----------
    name, stage : str
    paper : str
        Link; empty for a control.
    basis : {"known", "reconstructed"}
        Whether the details were read in the paper or the authors' code, or are our design.
    in_decode : str
        What happens while the answer is decoded.
    budget_field : str
        The field that a plan's text sets after a colon.
    budget_hint : str
        How to write it, for messages.
    instead_of_budget : tuple of str
        Options that say how much in its place.
    """

    name: ClassVar[str]
    stage: ClassVar[str]
    paper: ClassVar[str] = ""
    basis: ClassVar[str] = "known"
    in_decode: ClassVar[str] = "nothing more is evicted"
    budget_field: ClassVar[str] = "budget"
    budget_hint: ClassVar[str] = "write {name}:0.2 to keep 20 %, or {name}:128"
    instead_of_budget: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check the fields; subclasses add their own checks and call this one.

        Raises
        ------
        PlanError
            If a value is not one of a field's choices, or not a finite number where it must be one.
        """
        for key, hint in _hints(type(self)).items():
            value: Any = getattr(self, key)
            if hint is Budget and not isinstance(value, Budget):
                object.__setattr__(self, key, Budget.of(value))
            choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
            if choices is not None and value not in choices:
                shown = ", ".join(str(choice) for choice in choices)
                raise PlanError(f"{self.name}: {key}={value} is not a choice: take {shown}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if hint is int and not (number and isinstance(value, int)):
                raise PlanError(f"{self.name}: {key}={value} is not a whole number")
            if hint is float and not (number and math.isfinite(value)):
                raise PlanError(f"{self.name}: {key}={value} is not a finite number")
            if hint is bool and not isinstance(value, bool):
                raise PlanError(f"{self.name}: {key}={value} is neither true nor false")

    @property
    def is_identity(self) -> bool:
        """Whether this setting does nothing, so that the plain path is taken."""
        return False

    def check_beside(self, others: Sequence[Method]) -> None:
        """Raise PlanError if it cannot act beside the plan's other methods."""

    def check_model(self, text_model: nn.Module) -> None:
        """Raise PlanError if it cannot act on a model."""

    @classmethod
    def takes_budget(cls) -> bool:
        """Whether a plan's text may set a budget after a colon."""
        return any(field.name == cls.budget_field for field in dataclasses.fields(cls))

    @classmethod
    def needs_budget(cls) -> bool:
        """Whether a plan's text must set one: a budget that may be None may be left out."""
        return cls.takes_budget() and any(
            field.name == cls.budget_field and field.default is not None
            for field in dataclasses.fields(cls)
        )

    def replace(self, **changes: Any) -> typing.Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        changed = []
        budget = ""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == self.budget_field:
                # A method that can only keep everything takes no budget in text.
                other = any(getattr(self, key) is not None for key in self.instead_of_budget)
                given = self.takes_budget() and value is not None and not other
                budget = f":{value}" if given else ""
            elif value != field.default:
                changed.append(f"{field.name}={_as_text(value)}")
        return self.name + budget + (f"({', '.join(changed)})" if changed else "")


def _hints(method: type[Method]) -> dict[str, Any]:
    hints = typing.get_type_hints(method)
    return {field.name: hints[field.name] for field in dataclasses.fields(method)}


def _as_text(value: Any) -> str:
    """A field's value as a plan's text writes it, read back by :func:`read_field`."""
    if isinstance(value, tuple):
        return "[" + ",".join(_as_text(part) for part in value) + "]"
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value)


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
    hints = _hints(method)
    if key not in hints:
        close = difflib.get_close_matches(key, hints, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(hints))}"
        raise PlanError(f"{method.name} has no option {key!r}: {remedy}")
    try:
        return _convert(hints[key], text)
    except ValueError as error:
        raise PlanError(f"{method.name}({key}={text}): {error}") from None


def _convert(hint: Any, text: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        if text not in (choices := [str(c) for c in typing.get_args(hint)]):
            raise ValueError(f"choose one of {', '.join(choices)}")
        return next(c for c in typing.get_args(hint) if str(c) == text)
    if origin in (typing.Union, types.UnionType):
        kinds = typing.get_args(hint)
        if type(None) in kinds and text.lower() == "none":
            return None
        for kind in kinds:
            if kind is not type(None):
                try:
                    return _convert(kind, text)
                except ValueError:
                    continue
        raise ValueError(f"{text!r} does not fit")
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        parts = text.strip("[]()").replace(";", ",").split(",")
        return tuple(_convert(inner, part.strip()) for part in parts if part.strip())
    if hint is bool:
        if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
            raise ValueError("write true or false")
        return text.lower() in ("true", "yes", "1")
    if hint is int:
        if not re.fullmatch(r"-?[0-9]+", text):
            raise ValueError("write a whole number")
        return int(text)
    if hint is float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError("write a number")
        return number
    if hint is str:
        return text
    if hint is Budget:
        return Budget.parse(text)
    raise ValueError(f"cannot be set from text (type {hint})")
