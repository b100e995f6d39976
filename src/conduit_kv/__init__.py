"""Conduit: cheap vision-language inference by working on the visual tokens' KV cache.

>>> import conduit_kv as ckv
>>> vlm = ckv.load("embedded")
>>> reply = vlm.ask("Where is the dog?", images=["room.png"], plan="tgv-kv:0.2")
>>> print(reply.text, reply.report)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conduit_kv.artefact import load_artefact
    from conduit_kv.budget import Budget
    from conduit_kv.engine.compress import Run, compress
    from conduit_kv.engine.load import load
    from conduit_kv.engine.report import Report
    from conduit_kv.engine.runner import Reply
    from conduit_kv.engine.sampling import Sampling
    from conduit_kv.engine.selftest import SelfTest
    from conduit_kv.engine.session import Session
    from conduit_kv.engine.vlm import VLM
    from conduit_kv.errors import ConduitError, InputError, ModelError, PlanError
    from conduit_kv.plan import Plan
    from conduit_kv.reuse.store import Store

__version__ = "0.1.0"

# Read when asked for, so that the command line's help does not wait for PyTorch.
_WHERE = {
    "Budget": "budget",
    "ConduitError": "errors",
    "InputError": "errors",
    "ModelError": "errors",
    "Plan": "plan",
    "PlanError": "errors",
    "Reply": "engine.runner",
    "Report": "engine.report",
    "Run": "engine.compress",
    "Sampling": "engine.sampling",
    "SelfTest": "engine.selftest",
    "Session": "engine.session",
    "Store": "reuse.store",
    "VLM": "engine.vlm",
    "compress": "engine.compress",
    "load": "engine.load",
    "load_artefact": "artefact",
}

__all__ = [
    "VLM",
    "Budget",
    "ConduitError",
    "InputError",
    "ModelError",
    "Plan",
    "PlanError",
    "Reply",
    "Report",
    "Run",
    "Sampling",
    "SelfTest",
    "Session",
    "Store",
    "compress",
    "load",
    "load_artefact",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
