"""Evict: which K/V of a layer stay after prefill, and in decoding. One file, one method."""
