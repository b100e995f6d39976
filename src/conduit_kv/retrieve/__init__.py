"""What a question chooses from, how it asks, and the places that what it chooses takes."""

from conduit_kv.retrieve.bank import Bank, contiguous_positions

__all__ = ["Bank", "contiguous_positions"]
