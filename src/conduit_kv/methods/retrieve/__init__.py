"""Retrieve: which stored visual tokens a question sees. One file, one method."""

from conduit_kv.methods.retrieve.attention_select import AttentionSelect
from conduit_kv.methods.retrieve.base import Ranking, RetrieveMethod
from conduit_kv.methods.retrieve.mean_similarity import MeanSimilarity
from conduit_kv.methods.retrieve.quest import Quest
from conduit_kv.methods.retrieve.random_select import RandomSelect
from conduit_kv.methods.retrieve.rekv import ReKv
from conduit_kv.methods.retrieve.retoken import ReToken
from conduit_kv.methods.retrieve.uniform_frames import UniformFrames

__all__ = [
    "AttentionSelect",
    "MeanSimilarity",
    "Quest",
    "RandomSelect",
    "Ranking",
    "ReKv",
    "ReToken",
    "RetrieveMethod",
    "UniformFrames",
]
