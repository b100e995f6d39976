"""Reuse: which visual tokens of a reused image are computed again. One file, one method."""

from conduit_kv.methods.reuse.base import ReuseMethod, ReuseView
from conduit_kv.methods.reuse.cacheblend import CacheBlend
from conduit_kv.methods.reuse.conduit import Conduit
from conduit_kv.methods.reuse.controls import FirstRefresh, RandomRefresh, ReuseAll
from conduit_kv.methods.reuse.kvshare import KvShare
from conduit_kv.methods.reuse.prophetkv import ProphetKv

__all__ = [
    "CacheBlend",
    "Conduit",
    "FirstRefresh",
    "KvShare",
    "ProphetKv",
    "RandomRefresh",
    "ReuseAll",
    "ReuseMethod",
    "ReuseView",
]
