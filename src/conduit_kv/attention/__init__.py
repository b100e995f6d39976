"""Attention over what a layer holds: the paths, their choice, and the registered function."""

from conduit_kv.attention.function import ATTENTION, Answer, Question, Step, register_attention
from conduit_kv.attention.merge import merge_parts
from conduit_kv.attention.paths import attend

__all__ = [
    "ATTENTION",
    "Answer",
    "Question",
    "Step",
    "attend",
    "merge_parts",
    "register_attention",
]
