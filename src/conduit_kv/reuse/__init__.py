"""Entries: what is stored of an image, under which key, and how it comes to a new place."""

from conduit_kv.reuse.entry import VERSION, Entry
from conduit_kv.reuse.fill import fill
from conduit_kv.reuse.keys import Key, fingerprint, processor_digest
from conduit_kv.reuse.rotate import columns_of, rotary_of, rotate, unrotate
from conduit_kv.reuse.store import Store

__all__ = [
    "VERSION",
    "Entry",
    "Key",
    "Store",
    "columns_of",
    "fill",
    "fingerprint",
    "processor_digest",
    "rotary_of",
    "rotate",
    "unrotate",
]
