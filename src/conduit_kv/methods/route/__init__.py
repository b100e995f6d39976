"""Route: which visual tokens run in which layers of the prefill. One file, one method."""

from conduit_kv.methods.route.base import RouteMethod
from conduit_kv.methods.route.fastv import FastV
from conduit_kv.methods.route.lightkv import LightKv
from conduit_kv.methods.route.pdrop import PDrop
from conduit_kv.methods.route.reroute import Delete, Reroute

__all__ = ["Delete", "FastV", "LightKv", "PDrop", "Reroute", "RouteMethod"]
