"""Contract 1: at its identity setting every method equals plain Transformers.

The tolerance is ``TOLERANCE`` of ``helpers.py``: 1e-5 of the largest logit, in fp32.
"""

from __future__ import annotations

import pytest
import torch

from conduit_kv import compress
from tests.contracts.helpers import (
    EVICT,
    TOLERANCE,
    as_it_was,
    batch_and_singles,
    error,
    held,
    plain_logits,
    plan_of,
    sampled,
    turn,
)
from tests.tiny import FAMILY_NAMES, NAMES, tiny_inputs, tiny_model

GENERATE = {
    "max_new_tokens": 4,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def equal_generation(model, plan, inputs, **options):
    """Plain and compressed ``generate`` give the same tokens and logits; gives both outputs."""
    options = GENERATE | options
    with as_it_was(model):
        plain = model.generate(**inputs, **options)
    with as_it_was(model), compress(model, plan) as run:
        ours = model.generate(**inputs, **options)
    assert torch.equal(ours.sequences, plain.sequences)
    for mine, expected in zip(ours.logits, plain.logits, strict=True):
        assert error(mine, expected) < TOLERANCE
    return run, ours, plain


@pytest.mark.parametrize("method", EVICT)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_identity_equals_plain(family, method):
    model, _ = tiny_model(family)
    inputs = turn(family, 2)
    expected = plain_logits(model, inputs)
    with as_it_was(model), compress(model, plan_of(method, 1.0)):
        assert error(model(**inputs).logits, expected) < TOLERANCE
    equal_generation(model, plan_of(method, 1.0), inputs)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("attention_path", ["sdpa", "grouped"], indirect=True)
def test_a_padded_batch_equals_plain(family, attention_path):
    model, _ = tiny_model(family)
    inputs, _ = batch_and_singles(family, (1, 0, 2))
    equal_generation(model, "full", inputs)


@pytest.mark.parametrize(("family", "method"), sampled(2))
@pytest.mark.parametrize("budget", [100_000, "1GB"])
def test_a_budget_beyond_the_prompt_keeps_everything(family, method, budget):
    """The scoring path runs, and evicts nothing: neither in prefill nor in decoding."""
    if method == "full":
        pytest.skip("takes no budget")
    model, _ = tiny_model(family)
    run, *_ = equal_generation(model, plan_of(method, budget), turn(family, 1))
    seen = run.cache.get_seq_length()
    assert all(len(head) == seen for layer in held(run.cache) for head in layer)


@pytest.mark.parametrize("method", EVICT)
def test_a_share_of_visual_tokens_of_one_is_the_identity(method):
    if method == "full":
        pytest.skip("takes no budget")
    model, _ = tiny_model("qwen2.5-vl")
    equal_generation(model, plan_of(method, 1.0, "of=visual"), turn("qwen2.5-vl", 2))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_videos_equal_plain(family):
    from tests.tiny import VIDEO_NAMES

    if family not in VIDEO_NAMES:
        pytest.skip("takes no videos")
    model, _ = tiny_model(family)
    inputs = tiny_inputs(family, (0, 0), n_videos=(1, 0))
    equal_generation(model, "snapkv:1.0", inputs)
