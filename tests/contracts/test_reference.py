"""Contract 1 beyond the identity: answers and later turns equal one masked forward."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.helpers import (
    EVICT,
    TOLERANCE,
    converse,
    error,
    joined,
    plan_of,
    reference,
    tokens,
    turn,
)
from tests.tiny import FAMILY_NAMES, tiny_model


def conversation(name: str) -> list[dict[str, torch.Tensor]]:
    """An image and a question, an answer, another image, an answer, and words alone."""
    return [
        turn(name, 1),
        tokens(70),
        tokens(71),
        turn(name, 1, " And this?", seed=1, first=False),
        tokens(72),
        tokens(73),
        turn(name, 0, " Is it red?", first=False),
        tokens(74),
    ]


@pytest.mark.parametrize("method", EVICT)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_conversation_equals_a_masked_forward(family, method):
    model, _ = tiny_model(family)
    parts = conversation(family)
    run = converse(model, plan_of(method, 0.4, merge=False), parts)
    expected = reference(model, joined(parts), run.steps)
    assert error(run.logits, expected) < TOLERANCE
    seen = run.cache.get_seq_length()
    gone = [seen - len(head) for layer in run.held for head in layer]
    assert (sum(gone) == 0) == (method == "full")


@pytest.mark.parametrize("method", ["tgv-kv", "h2o", "ada-kv"])
@pytest.mark.parametrize("name", ["llava-next-sliding", "qwen2.5-vl-sliding"])
def test_sliding_layers_keep_their_window_and_all_their_tokens(name, method):
    model, _ = tiny_model(name)
    parts = conversation(name)
    run = converse(model, plan_of(method, 0.4), parts)
    assert error(run.logits, reference(model, joined(parts), run.steps)) < TOLERANCE
    for layer, kept in zip(run.cache, run.held, strict=True):
        if layer.kind == "sliding":
            assert all(len(head) == run.cache.get_seq_length() for head in kept)
    assert any("were left alone" in note or "nothing evicted" in note for note in run.notes)
