"""KVCapsule's learned parts: fitting them on images, and what follows from them."""

from conduit_kv.capsule.moments import Moments

__all__ = ["Moments"]
