"""One thread, and attention paths that no measurement chooses: the same numbers every time."""

from __future__ import annotations

import pytest
import torch

from conduit_kv.attention import paths

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def attention_path(monkeypatch, request):
    """Which path attends: ``sdpa`` in prefill and ``grouped`` in decoding, unless a test says."""
    wanted = getattr(request, "param", None)

    def choose(query, keys, slots, known):
        if wanted is not None:
            return wanted
        return "sdpa" if query.shape[2] == slots else "grouped"

    monkeypatch.setattr(paths, "choose", choose)
    return wanted
