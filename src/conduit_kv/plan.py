"""A plan: at most one method per stage, composed and read from text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conduit_kv.budget import Budget
from conduit_kv.errors import PlanError
from conduit_kv.methods import Method
from conduit_kv.methods.base import STAGES, read_field
from conduit_kv.methods.catalogue import find
from conduit_kv.methods.evict import EvictMethod, Full
from conduit_kv.methods.flow import FlowMethod
from conduit_kv.methods.hold import HoldMethod
from conduit_kv.methods.reduce.nuwa import nuwa
from conduit_kv.methods.reuse import ReuseMethod
from conduit_kv.methods.route import Delete

_OPEN, _CLOSE = "([", ")]"


@dataclass(frozen=True)
class Plan:
    """What is done to a visual token's K/V, stage by stage.

    Attributes
    ----------
    methods : tuple of Method
        At most one per stage, in the order of the stages. A plan of none is ``full``.
    """

    methods: tuple[Method, ...] = ()

    def __post_init__(self) -> None:
        ordered = sorted(self.methods, key=lambda method: STAGES.index(method.stage))
        for first, second in itertools.pairwise(ordered):
            if first.stage == second.stage:
                raise PlanError(
                    f"{first.name} and {second.name} both act in the stage {first.stage}: "
                    "take one of them"
                )
        for method in ordered:
            method.check_beside([other for other in ordered if other is not method])
        object.__setattr__(self, "methods", tuple(ordered) or (Full(),))

    @staticmethod
    def parse(text: str) -> Plan:
        """Read ``method[:budget][(key=value, ...)]``, several joined by ``+``.

        Raises
        ------
        PlanError
            If the text cannot be read; the message says where and what to write instead.
        """
        _check_brackets(text)
        parts = [part.strip() for part in _split(text, "+")]
        if parts == [""]:
            raise PlanError("the plan is empty: write a method such as tgv-kv:0.2, or full")
        if "" in parts:
            raise PlanError(f"plan {text!r}: a method is missing beside a '+'")
        return Plan(tuple(method for part in parts for method in _methods(part)))

    @staticmethod
    def of(value: Plan | str | Method | None) -> Plan:
        """A plan from a plan, its text, one method or nothing (``full``)."""
        if isinstance(value, Plan):
            return value
        if value is None:
            return Plan()
        if isinstance(value, Method):
            return Plan((value,))
        if isinstance(value, str):
            return Plan.parse(value)
        raise PlanError(f"a plan is text, a Plan or a method, not {type(value).__name__}")

    def stage(self, name: str) -> Method | None:
        """The method that acts in a stage, if there is one."""
        return next((method for method in self.methods if method.stage == name), None)

    @property
    def reuse(self) -> ReuseMethod | None:
        method = self.stage("reuse")
        return method if isinstance(method, ReuseMethod) else None

    @property
    def reduce(self) -> Method | None:
        return self.stage("reduce")

    @property
    def route(self) -> Method | None:
        return self.stage("route")

    @property
    def flows(self) -> list[FlowMethod]:
        """What decides which tokens run in the prefill: reduce and route, if they do anything."""
        found = [method for method in (self.reduce, self.route) if method is not None]
        flows = [method for method in found if isinstance(method, FlowMethod)]
        if len(flows) < len(found):
            raise PlanError(f"{found[0].name} is no FlowMethod: it cannot act in the prefill")
        return [method for method in flows if not method.is_identity]

    @property
    def evict(self) -> EvictMethod | None:
        method = self.stage("evict")
        return method if isinstance(method, EvictMethod) else None

    @property
    def hold(self) -> HoldMethod | None:
        method = self.stage("hold")
        return method if isinstance(method, HoldMethod) else None

    @property
    def retrieve(self) -> Method | None:
        return self.stage("retrieve")

    @property
    def retrieves(self) -> bool:
        """Whether each question chooses what it sees of images that were prefilled alone."""
        return self.retrieve is not None and not self.retrieve.is_identity

    @property
    def takes_entries(self) -> bool:
        """Whether images are prefilled alone and kept in a store."""
        return any(method is not None and not method.is_identity
                   for method in (self.reuse, self.retrieve))  # fmt: skip

    def check_store(self, store: object) -> None:
        """Raise PlanError if there is a store, and this plan would neither read nor fill it."""
        if store is not None and not self.takes_entries:
            raise PlanError(
                f"the plan {self} reuses no images, so that nothing would be taken from the store "
                "or put into it: write for example conduit:0.1, or leave the store out"
            )

    @property
    def beginning(self) -> Plan:
        """What shapes a prefill itself: all but evict and hold, which act on what it leaves.

        Beside a retrieve method, hold shapes it: it packs what questions choose from.
        """
        later = ("evict",) if self.retrieves else ("evict", "hold")
        return Plan(tuple(m for m in self if m.stage not in later and not m.is_identity))

    @property
    def is_identity(self) -> bool:
        """Whether no method does anything, so that the plain path is taken."""
        return all(method.is_identity for method in self.methods)

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods)

    def __str__(self) -> str:
        return " + ".join(str(method) for method in self.methods)


def _methods(text: str) -> tuple[Method, ...]:
    """What a part of a plan stands for: a method, or those of a shorthand."""
    if re.match(r"\s*nuwa\s*($|[:(])", text):
        given = _method(text.replace("nuwa", "delete", 1))
        if not isinstance(given, Delete) or given != Delete(given.budget):
            raise PlanError(
                f"{text!r}: nuwa takes a budget alone; write nuwa-reduce:... + "
                "delete:...(rank=nuwa) to set more"
            )
        return nuwa(given.budget)
    return (_method(text),)


def _method(text: str) -> Method:
    """One method from ``name[:budget][(key=value, ...)]``."""
    found = re.fullmatch(r"([^:(\[\])]*)(?::([^(\[\])]*))?(\(.*\))?\s*", text, re.DOTALL)
    if found is None:
        raise PlanError(f"cannot read {text!r}: write method:budget(key=value, ...)")
    name, budget, inside = found[1].strip(), found[2], found[3]
    if not name:
        raise PlanError(f"cannot read {text!r}: the method's name is missing")
    method = find(name)
    options = _options(text, inside[1:-1]) if inside is not None else {}
    field = method.budget_field
    names = [key for key in options if key in ("budget", "keep", field)]
    if len(names) > 1:
        raise PlanError(
            f"{text!r} sets {' and '.join(sorted(names, reverse=True))}, which are the same: "
            "leave one out"
        )
    if budget is not None and names:
        raise PlanError(f"{text!r} sets the budget twice: leave one out")
    if names:
        budget = options.pop(names[0])
    values = {}
    if budget is not None:
        if not method.takes_budget():
            raise PlanError(f"{name} takes no budget: write {name} alone")
        values[field] = _budget(method, budget)
    elif method.needs_budget() and not set(method.instead_of_budget) & set(options):
        raise PlanError(f"{name} needs a budget: {method.budget_hint.format(name=name)}")
    for key, value in options.items():
        values[key] = read_field(method, key, value)
    return method(**values)


def _budget(method: type[Method], text: str) -> Any:
    if method.budget_field != "budget":
        return read_field(method, method.budget_field, text.strip())
    try:
        return Budget.parse(text)
    except PlanError as error:
        raise PlanError(f"{method.name}: {error}") from None


def _options(text: str, inside: str) -> dict[str, str]:
    """``key=value`` pairs between the parentheses of ``text``."""
    options: dict[str, str] = {}
    parts = [part.strip() for part in _split(inside, ",")]
    for part in [] if parts == [""] else parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise PlanError(f"{text!r}: write options as key=value, not {part!r}")
        if key in options:
            raise PlanError(f"{text!r} sets {key} twice: leave one out")
        options[key] = value
    return options


def _check_brackets(text: str) -> None:
    waiting: list[str] = []
    for place, char in enumerate(text):
        if char in _OPEN:
            waiting.append(_CLOSE[_OPEN.index(char)])
        elif char in _CLOSE and (not waiting or waiting.pop() != char):
            raise PlanError(f"plan {text!r}: {char!r} at place {place + 1} closes nothing")
    if waiting:
        raise PlanError(f"plan {text!r}: {waiting[-1]!r} is missing")


def _split(text: str, separator: str) -> list[str]:
    """``text`` cut at each ``separator`` outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in _OPEN) - (char in _CLOSE)
        if char == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
