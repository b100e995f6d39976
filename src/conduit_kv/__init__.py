"""Conduit: cheap vision-language inference by working on the visual tokens' KV cache.

>>> import conduit_kv as ckv
>>> vlm = ckv.load("embedded")
>>> reply = vlm.ask("Where is the dog?", images=["room.png"], plan="tgv-kv:0.2")
>>> print(reply.text, reply.report)
"""

from conduit_kv.budget import Budget
from conduit_kv.engine.compress import Run, compress
from conduit_kv.engine.load import load
from conduit_kv.engine.report import Report
from conduit_kv.engine.sampling import Sampling
from conduit_kv.engine.vlm import VLM, Reply, SelfTest, Session
from conduit_kv.errors import ConduitError, InputError, ModelError, PlanError
from conduit_kv.plan import Plan

__version__ = "0.1.0"

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
    "compress",
    "load",
]
