"""A tiny model that answers nonsense, quickly."""

import pytest

from conduit_kv.engine.vlm import VLM
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def vlm() -> VLM:
    return VLM(*tiny_model("llava"), "tiny")
