"""KVCapsule's learned parts: fitting them on images, and the file that holds them."""

from conduit_kv.capsule.artefact import Artefact, load_artefact

__all__ = ["Artefact", "load_artefact"]
