"""Errors that a user can act on: each names the cause and the remedy."""


class ConduitError(Exception):
    """Base of every error that Conduit raises on purpose."""


class InputError(ConduitError, ValueError):
    """What the user gave cannot be used: a missing file, a damaged image, a prompt too long."""


class PlanError(ConduitError, ValueError):
    """A plan cannot be read, or cannot be carried out on this model or request."""


class ModelError(ConduitError, RuntimeError):
    """A model cannot be loaded, is of an unknown family, or lacks a part."""
