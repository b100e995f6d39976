"""Tests that need no downloaded weights."""
