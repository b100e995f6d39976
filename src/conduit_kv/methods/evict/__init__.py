"""Evict: which K/V of a layer stay after prefill, and in decoding. One file, one method."""

from conduit_kv.methods.evict.ada_kv import AdaKv
from conduit_kv.methods.evict.aircache import AirCache
from conduit_kv.methods.evict.base import FLOOR, EvictMethod, Scores
from conduit_kv.methods.evict.full import Full
from conduit_kv.methods.evict.h2o import H2O
from conduit_kv.methods.evict.knorm import KNorm
from conduit_kv.methods.evict.look_m import LookM
from conduit_kv.methods.evict.prefixkv import PrefixKv
from conduit_kv.methods.evict.pyramidkv import PyramidKv
from conduit_kv.methods.evict.random import Random
from conduit_kv.methods.evict.select import PROTECTED
from conduit_kv.methods.evict.snapkv import SnapKv
from conduit_kv.methods.evict.streaming_llm import StreamingLlm
from conduit_kv.methods.evict.text_random import TextRandom
from conduit_kv.methods.evict.tgv_kv import TgvKv
from conduit_kv.methods.evict.tova import Tova
from conduit_kv.methods.evict.uniform import Uniform
from conduit_kv.methods.evict.vl_cache import VlCache

__all__ = [
    "FLOOR",
    "H2O",
    "PROTECTED",
    "AdaKv",
    "AirCache",
    "EvictMethod",
    "Full",
    "KNorm",
    "LookM",
    "PrefixKv",
    "PyramidKv",
    "Random",
    "Scores",
    "SnapKv",
    "StreamingLlm",
    "TextRandom",
    "TgvKv",
    "Tova",
    "Uniform",
    "VlCache",
]
