"""A request's KV cache: layers of segments, with which tokens they hold."""

from conduit_kv.cache.cache import VisualCache
from conduit_kv.cache.capsule import Capsule
from conduit_kv.cache.layer import Kept, VisualLayer
from conduit_kv.cache.packed import Narrow, PackedSegment, Part, Quantised, Store
from conduit_kv.cache.progress import Progress
from conduit_kv.cache.segments import DenseSegment, RaggedSegment, Segment

__all__ = [
    "Capsule",
    "DenseSegment",
    "Kept",
    "Narrow",
    "PackedSegment",
    "Part",
    "Progress",
    "Quantised",
    "RaggedSegment",
    "Segment",
    "Store",
    "VisualCache",
    "VisualLayer",
]
