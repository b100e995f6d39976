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


@pytest.mark.parametrize("family", ["llava", "qwen3-vl", "idefics3"])
def test_merged_keys_and_values_lie_in_the_cache(family):
    """LOOK-M: each evicted token is averaged into the kept one of the most similar key."""
    model, _ = tiny_model(family)
    inputs = turn(family, 2)
    whole = converse(model, "full", [inputs]).cache
    merged = converse(model, "look-m:0.4", [inputs]).cache
    for layer, (all_of_it, left) in enumerate(zip(whole, merged, strict=True)):
        for head in range(left.kv_heads):
            _, keys, values = all_of_it.read(0, [head])
            keys, values = keys[0], values[0]
            kept, new_keys, new_values = left.read(0, [head])
            gone = [token for token in range(len(keys)) if token not in set(kept.tolist())]
            nearest: dict[int, list[int]] = {token: [token] for token in kept.tolist()}
            for token in gone:
                likeness = torch.cosine_similarity(keys[token][None], keys[kept], dim=-1)
                nearest[int(kept[likeness.argmax()])].append(token)
            assert any(len(members) > 1 for members in nearest.values()), layer
            for at, members in enumerate(nearest.values()):
                assert torch.allclose(new_keys[0, at], keys[members].mean(0), atol=1e-5)
                assert torch.allclose(new_values[0, at], values[members].mean(0), atol=1e-5)
