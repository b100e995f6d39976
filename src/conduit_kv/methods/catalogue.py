"""All names that plans know, in the order in which they are shown."""

from __future__ import annotations

import difflib

from conduit_kv.errors import PlanError
from conduit_kv.methods.base import Method, registry

NAMES: dict[str, tuple[str, ...]] = {
    "reuse": (
        "conduit",
        "prophetkv",
        "cacheblend",
        "kvshare",
        "first-refresh",
        "random-refresh",
        "reuse-all",
    ),
    "reduce": (
        "nuwa-reduce",
        "visionzip",
        "divprune",
        "cdpruner",
        "tome",
        "random-reduce",
        "uniform-reduce",
    ),
    "route": ("fastv", "pdrop", "reroute", "delete", "lightkv"),
    "evict": (
        "full",
        "random",
        "text-random",
        "uniform",
        "streaming-llm",
        "h2o",
        "snapkv",
        "pyramidkv",
        "ada-kv",
        "tova",
        "knorm",
        "vl-cache",
        "look-m",
        "prefixkv",
        "aircache",
        "tgv-kv",
    ),
    "hold": (
        "windowquant",
        "random-windows",
        "kivi",
        "rtn",
        "fp8",
        "kvcapsule",
        "stride-interpolate",
        "pca",
    ),
    "retrieve": (
        "retoken",
        "attention-select",
        "rekv",
        "uniform-frames",
        "mean-similarity",
        "quest",
        "random-select",
    ),
}
"""Per stage, in the order in which they are shown."""

SHORTHANDS = {"nuwa": "reduce and route"}
"""Names that stand for methods of several stages."""


def stage_of(name: str) -> str | None:
    """The stage of a known name; None if the name is unknown."""
    return next((stage for stage, names in NAMES.items() if name in names), None)


def find(name: str) -> type[Method]:
    """The method called ``name``.

    Raises
    ------
    PlanError
        If there is none; the message says what to write instead.
    """
    methods = registry()
    if name in methods:
        return methods[name]
    plain = name.lower().replace("_", "-")
    every = {known.replace("-", ""): known for known in (*methods, *SHORTHANDS, *_all_names())}
    close = difflib.get_close_matches(plain.replace("-", ""), every, n=1, cutoff=0.6)
    remedy = f"did you mean {every[close[0]]}?" if close else f"known are {', '.join(methods)}"
    raise PlanError(f"unknown method {name!r}: {remedy}")


def _all_names() -> list[str]:
    return [name for names in NAMES.values() for name in names]
