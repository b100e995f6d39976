"""Measure plans: what they answer, what they keep, how long they take."""

from conduit_kv.bench.protocols import PROTOCOLS, Outcome, Prompt, answer, measure, prompt_of
from conduit_kv.bench.run import CONTROLS, Bench, Crew, Settings
from conduit_kv.bench.stats import Difference, agreement, compare, wilson

__all__ = [
    "CONTROLS",
    "PROTOCOLS",
    "Bench",
    "Crew",
    "Difference",
    "Outcome",
    "Prompt",
    "Settings",
    "agreement",
    "answer",
    "compare",
    "measure",
    "prompt_of",
    "wilson",
]
