"""Reduce: fewer visual tokens before the language model. One file, one method."""

from conduit_kv.methods.reduce.base import ReduceMethod
from conduit_kv.methods.reduce.cdpruner import CdPruner
from conduit_kv.methods.reduce.controls import RandomReduce, UniformReduce
from conduit_kv.methods.reduce.divprune import DivPrune
from conduit_kv.methods.reduce.nuwa import NuwaReduce
from conduit_kv.methods.reduce.tome import ToMe
from conduit_kv.methods.reduce.visionzip import VisionZip

__all__ = [
    "CdPruner",
    "DivPrune",
    "NuwaReduce",
    "RandomReduce",
    "ReduceMethod",
    "ToMe",
    "UniformReduce",
    "VisionZip",
]
