"""The one place that knows how supported Transformers releases (5.19 and later) differ."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = ("cache", "past_key_values")
"""The cache's argument name, newest first: 5.24 renamed ``past_key_values`` to ``cache``."""


@cache
def _names_of(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def cache_name(module_class: type) -> str:
    """How ``forward`` of ``module_class`` calls its cache argument."""
    names = _names_of(module_class.forward)  # type: ignore[attr-defined]
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def take_cache(arguments: dict[str, Any]) -> Any:
    """Remove the cache from a call's keyword arguments and return it, whatever its name."""
    found = [arguments.pop(name) for name in CACHE_NAMES if name in arguments]
    return next((value for value in found if value is not None), None)


def text_output(
    hidden: Tensor, cache: Cache, hidden_states: tuple[Tensor, ...] | None
) -> BaseModelOutputWithPast:
    """What a text model's forward returns, with the cache under the release's own name."""
    field = next(n for n in CACHE_NAMES if n in BaseModelOutputWithPast.__dataclass_fields__)
    return BaseModelOutputWithPast(
        last_hidden_state=hidden, hidden_states=hidden_states, **{field: cache}
    )
