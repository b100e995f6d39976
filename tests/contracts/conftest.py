"""One thread, and attention paths that no measurement chooses: the same numbers every time."""

from __future__ import annotations

import pytest
import torch

from conduit_kv.attention import paths
from tests.contracts import matrix

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    matrix.note(item, report)
    return report


def pytest_sessionfinish(session):
    matrix.write(session.config.rootpath / matrix.FOLDER)
