"""Conduit inside other projects' tools, through their own plugin mechanisms."""
