"""The example's reference runs as those of the methods do: with their hypothesis profile."""

from tests.methods import conftest as methods

assert methods.settings.get_profile("methods")
