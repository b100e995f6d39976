"""What a method carries over belongs to its tokens: through turns, steps, batches and beams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from conduit_kv import VLM, compress
from conduit_kv.methods.evict import PROTECTED, EvictMethod, Scores
from conduit_kv.plan import Plan
from conduit_kv.view import LayerView
from tests.contracts.helpers import (
    as_it_was,
    batch_and_singles,
    converse,
    held,
    tokens,
    turn,
    with_cache,
)
from tests.tiny import tiny_model


@dataclass(frozen=True)
class Ages(EvictMethod):
    """Carries, for each token, at how many scorings it was there; evicts by a hash.

    With ``heads`` each KV head keeps its own tokens.
    """

    name: ClassVar[str] = "ages"
    heads: bool = False
    decode: bool = True

    def _scores(self, view: LayerView) -> Scores:
        carried = torch.zeros(view.kv_heads, view.size)
        if view.carried is not None:
            carried = view.carried.expand(view.kv_heads, view.size)
        hashed = (view.index * 7919 + view.layer * 31) % 101
        tier = torch.zeros(view.size, dtype=torch.int8)
        tier[-1] = PROTECTED
        score = torch.stack([hashed.float()] * view.kv_heads)
        if self.heads:
            # The group's own keys tell heads apart, in a batch as alone.
            score = score * (1 + view.keys.abs().sum((1, 2))[:, None] % 1)
        return Scores(score if self.heads else score[0], tier, carry=carried + 1)

    def score(self, view: LayerView) -> Scores:
        return self._scores(view)

    @property
    def scores_steps(self) -> bool:
        return self.decode

    def score_step(self, view: LayerView) -> Scores:
        return self._scores(view)


def ages(cache, row=0) -> list[list[dict[int, int]]]:
    """Per layer, per KV head: the age carried of each token held."""
    found = []
    for number, layer in enumerate(cache):
        pairs = cache.eviction._carried[number, row]
        heads = []
        for head, kept in enumerate(held(cache, row)[number]):
            index, carry = pairs[head]
            known = dict(zip(index.tolist(), carry.tolist(), strict=True))
            heads.append({token: known[token] for token in kept.tolist() if token in known})
        assert len(heads) == layer.kv_heads
        found.append(heads)
    return found


def expected_ages(steps: list[tuple[int, int]], kept: list[int]) -> dict[int, int]:
    """A token's age: the scorings since it came. ``steps`` are the rows of each scoring."""
    return {token: sum(stop > token for _, stop in steps) for token in kept}


def check(cache, steps, row=0):
    for layer, heads in zip(ages(cache, row), held(cache, row), strict=True):
        for known, kept in zip(layer, heads, strict=True):
            assert known == expected_ages(steps, kept.tolist())


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("heads", [True, False])
def test_ages_through_a_conversation(heads, decode):
    model, _ = tiny_model("qwen3-vl")
    plan = Plan((Ages(budget=0.5, heads=heads, decode=decode),))
    parts = [turn("qwen3-vl", 1), tokens(70), tokens(71), turn("qwen3-vl", 1, first=False)]
    run = converse(model, plan, parts)
    # Heads that hold different tokens are not scored in decoding.
    scored = [s for s in run.steps if s.stop - s.start > 1 or (decode and not heads)]
    check(run.cache, [(step.start, step.stop) for step in scored])
    if decode and not heads:
        converse(model, plan, [tokens(72)], cache=run.cache)
        seen = run.cache.get_seq_length()
        check(run.cache, [(s.start, s.stop) for s in scored] + [(seen - 1, seen)])


def test_ages_of_a_batch_and_its_beams():
    model, _ = tiny_model("llava")
    batch, singles = batch_and_singles("llava", (1, 0, 1))
    plan = Plan((Ages(budget=0.6),))
    with as_it_was(model), compress(model, plan) as run:
        model(**batch)
        ids = torch.tensor([[70], [71], [72]])
        cache = run.cache
        model(input_ids=ids, **with_cache(model, cache))
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        cache.batch_repeat_interleave(2)
        model(input_ids=ids.repeat(2, 1), **with_cache(model, cache))
        cache.batch_select_indices(torch.tensor([0, 3, 5]))
        model(input_ids=ids, **with_cache(model, cache))
    for row, came_from in enumerate((2, 0, 1)):
        length = singles[came_from]["input_ids"].shape[1]
        assert cache.progress.counts[row] == length + 3
        check(cache, [(0, length), *((length + n, length + n + 1) for n in range(3))], row)


def test_ages_of_requests_decoded_together_and_of_forks():
    vlm = VLM(*tiny_model("llava"))
    plan = Plan((Ages(budget=0.6),))
    states = [vlm.prefill(turn("llava", count), plan) for count in (1, 2)]
    watched = vlm.prefill(turn("llava", 1), "full", watch=[plan])
    states += vlm.forks(watched, [plan])
    lengths = [state.cache.get_seq_length() for state in states]
    vlm.step(states, [70, 71, 72])
    copy = states[0].cache.fork()
    vlm.step(states[:1], [73])
    for state, length, steps in zip(states, lengths, (2, 1, 1), strict=True):
        check(state.cache, [(0, length), *((length + n, length + n + 1) for n in range(steps))])
    check(copy, [(0, lengths[0]), (lengths[0], lengths[0] + 1)])


def test_what_is_seen_as_carried_is_aligned_with_the_candidates():
    """The view of a turn gives each candidate its own age, and 0 to what is new."""
    seen: list[Tensor] = []

    class Looks(Ages):
        def score(self, view: LayerView) -> Scores:
            if view.carried is not None:
                seen.append(torch.stack([view.index.float(), view.carried[0]]))
            return super().score(view)

    model, _ = tiny_model("llava")
    plan = Plan((Looks(budget=0.5),))
    run = converse(model, plan, [turn("llava", 1), tokens(70), turn("llava", 0, first=False)])
    first, _, second = run.steps
    assert len(seen) == 4
    for pairs in seen:
        for token, age in pairs.T.tolist():
            came = 2 * (token < first.stop) or (token < second.start) * 1
            assert age == came
