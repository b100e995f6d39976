"""Tests of the family adapters, on tiny random models of the real classes."""
