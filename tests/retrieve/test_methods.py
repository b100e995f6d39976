"""Methods against their formulas, worked out in plain loops on plain tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from conduit_kv.budget import Budget
from conduit_kv.cache.gathered import GatheredSegment, PagedSegment
from conduit_kv.engine.runner import Runner
from conduit_kv.errors import PlanError
from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.base import registry
from conduit_kv.methods.retrieve import AttentionSelect, ReKv, UniformFrames
from conduit_kv.methods.retrieve.base import Ranking, take_images, unit_means, unit_softmax_means
from conduit_kv.plan import Plan
from conduit_kv.ranks import highest
from conduit_kv.retrieve import Bank, contiguous_positions
from conduit_kv.retrieve.question import Question, early_states
from tests.contracts.helpers import examples, turn
from tests.tiny import tiny_model


@torch.inference_mode()
def question_of(name: str = "llava", images: int = 2) -> Question:
    """A question about some images, as the stage makes it."""
    vlm = Runner(*tiny_model(name), name)
    state = vlm.prefill(turn(name, images), "random-select:1")
    retrieval = state.cache.retrieval
    text_model = vlm.family.text_model(vlm.model)
    layout = state.cache.progress.layouts[0]
    embed = text_model.get_input_embeddings()
    after = int(torch.nonzero(layout.visual)[-1]) + 1
    return Question(
        vlm.family, text_model, retrieval.bank, layout,
        embed(torch.tensor(retrieval.shelf.prefix)), embed(retrieval.ids[after:]),
    )  # fmt: skip


# -- formulas --------------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_early_states_are_those_of_the_plain_text_model(name: str) -> None:
    question = question_of(name)
    text = torch.cat([question.prefix, question.rows])[None]
    states = question.text_model(inputs_embeds=text, output_hidden_states=True).hidden_states
    ours = early_states(question.family, question.text_model, text, 3)
    for layer in range(4):
        assert torch.allclose(ours[layer], states[layer], atol=1e-5)
    # Padding at the end changes nothing before it.
    longer = torch.cat([text, torch.ones(1, 3, text.shape[-1])], 1)
    padded = early_states(question.family, question.text_model, longer, 3)[3]
    assert torch.allclose(padded[:, : text.shape[1]], ours[3], atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_attention_select(name: str) -> None:
    question = question_of(name)
    layer, count = 2, len(question.rows)
    found = AttentionSelect(Budget(5, "tokens"), depth=0.5).rank(question)
    queries, text = question.rotated(layer)
    visual = torch.cat(list(question.keys(layer, turned=True)), dim=1)
    heads, width, group = queries.shape[0], queries.shape[-1], queries.shape[0] // text.shape[0]
    expected = torch.zeros(visual.shape[1])
    for head in range(heads):
        for row in range(count):
            own = text[head // group][: len(question.prefix) + row + 1]
            keys = torch.cat([own, visual[head // group]])
            weights = (keys @ queries[head, row] / math.sqrt(width)).softmax(0)
            expected += weights[len(own) :] / (heads * count)
    assert torch.allclose(found.token, expected, atol=1e-6)
    sizes = [len(tokens) for tokens in question.bank.tokens]
    assert torch.allclose(found.unit, torch.stack([p.mean() for p in expected.split(sizes)]))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_rekv(name: str) -> None:
    question = question_of(name, 3)
    layer = 1
    queries = question.queries(layer)
    found = ReKv(Budget(5, "tokens")).rank_layer(question, layer, queries)
    expected = []
    for entry in map(question.bank.entry, range(len(question.bank))):
        asked, there = [], []
        for head in range(queries.shape[0]):
            asked.append(queries[head].mean(0))
            there.append(entry.keys[layer, head // (queries.shape[0] // 2)].mean(0))
        one, other = torch.cat(asked), torch.cat(there)
        expected.append(one @ other / one.norm() / other.norm())
    assert torch.allclose(found.unit, torch.stack(expected), atol=1e-6)


@torch.inference_mode()
def test_rekv_layers_choose_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer attends to its own best images, which stand before the question."""
    vlm = Runner(*tiny_model("llava"), "llava")
    ranked: dict[int, Ranking] = {}
    made = ReKv.rank_layer

    def rank_layer(self: ReKv, question: Question, layer: int, queries: Tensor) -> Ranking:
        ranked[layer] = made(self, question, layer, queries)
        return ranked[layer]

    monkeypatch.setattr(ReKv, "rank_layer", rank_layer)
    state = vlm.prefill(turn("llava", 3), "rekv:16")
    held = [state.cache.held(layer) for layer in range(4)]
    layout = state.cache.progress.layouts[0]
    assert all(int(layout.visual[tokens].sum()) == 16 for tokens in held)
    for number, layer in enumerate(state.cache):
        unit = layout.image[layer.frozen[0].held(0, 0)].unique().tolist()
        assert unit == [ranked[number].order[0]]


@torch.inference_mode()
def test_mean_similarity_is_a_cosine_of_means() -> None:
    question = question_of("llava", 3)
    found = registry()["mean-similarity"]().rank(question)
    text = question.rows.mean(0)
    for number in range(len(question.bank)):
        entry = question.bank.entry(number)
        mean = entry.features.mean(0)
        cosine = float(text @ mean / text.norm() / mean.norm())
        assert float(found.unit[number]) == pytest.approx(cosine, abs=1e-5)


@given(st.integers(1, 9), st.integers(1, 40))
@examples(60)
def test_uniform_frames(units: int, count: int) -> None:
    sizes = 4
    bank = Bank()
    for unit in range(units):
        bank.tokens.append(torch.arange(unit * sizes, (unit + 1) * sizes))
    question = Question(None, None, bank, None, torch.empty(0), torch.empty(0))  # type: ignore
    method = UniformFrames(Budget(count, "tokens"))
    count = min(count, units * sizes)
    chosen = method.choose(question, method.rank(question), count)
    assert len(chosen) == count and torch.equal(chosen, chosen.unique())
    taken = -(-count // sizes)
    wanted = {math.floor((j + 0.5) * units / taken) for j in range(taken)}
    assert set((chosen // sizes).tolist()) == wanted


@given(st.integers(0, 10_000))
@examples(25)
def test_quest_reads_the_pages_with_the_largest_bounds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size, page, pages = int(torch.randint(5, 30, (1,), generator=generator)), 4, 2
    keys, values = (torch.randn(1, 2, size, 8, generator=generator) for _ in range(2))
    query = torch.randn(1, 4, 1, 8, generator=generator)
    tokens = torch.arange(size) * 2
    segment = PagedSegment(keys, values, tokens, page, pages, torch.tensor([99]))
    found, lse = segment.attend(query, 0.3, torch.tensor([[999]]), None, with_lse=True)
    for group in range(2):
        bounds = []
        for start in range(0, size, page):
            part = keys[0, group, start : start + page]
            low, high = part.amin(0), part.amax(0)
            heads = [query[0, head, 0] for head in (2 * group, 2 * group + 1)]
            bounds.append(max(float(torch.maximum(q * low, q * high).sum()) for q in heads))
            # A bound is one: no key of the page gives more.
            assert all(bounds[-1] >= float(q @ k) - 1e-5 for q in heads for k in part)
        chosen = sorted(range(len(bounds)), key=lambda p: -bounds[p])[:pages]
        at = [i for p in sorted(chosen) for i in range(p * page, min(size, p * page + page))]
        for head in (2 * group, 2 * group + 1):
            logits = keys[0, group, at] @ query[0, head, 0] * 0.3
            assert torch.allclose(
                found[0, head, 0], logits.softmax(0) @ values[0, group, at], atol=1e-5
            )
            assert lse is not None and torch.allclose(
                lse[0, head, 0], logits.logsumexp(0), atol=1e-5
            )


# -- choosing --------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 30), st.integers(0, 99))
@examples(80)
def test_images_are_taken_whole_until_the_budget_is_used(
    sizes: list[int], count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(sum(sizes), generator=generator)
    order = torch.randperm(len(sizes), generator=generator).tolist()
    chosen = take_images(order, sizes, scores, count)
    assert len(chosen) == min(count, sum(sizes))
    expected, ends = [], torch.tensor(sizes).cumsum(0).tolist()
    for unit in order:
        mine = list(range(ends[unit] - sizes[unit], ends[unit]))
        mine.sort(key=lambda i: (-float(scores[i]), i))
        expected += mine[: count - len(expected)]
    assert chosen.tolist() == sorted(expected)


def test_ties_go_to_the_lower_index() -> None:
    assert highest(torch.tensor([1.0, 2.0, 2.0, 1.0]), 3).tolist() == [1, 2, 0]


def test_scores_of_units() -> None:
    scores, unit = torch.tensor([0.0, 2.0, 1.0, 500.0]), torch.tensor([0, 0, 1, 2])
    assert torch.allclose(unit_means(scores, unit), torch.tensor([1.0, 1.0, 500.0]))
    expected = torch.tensor([math.log((1 + math.exp(2)) / 2), 1.0, 500.0])
    assert torch.allclose(unit_softmax_means(scores, unit), expected)


def test_budgets() -> None:
    method = Plan.parse("uniform-frames:0.25").retrieve
    assert method.count(100, 10) == 25  # type: ignore[union-attr]
    assert Plan.parse("uniform-frames:392").retrieve.count(100, 10) == 100  # type: ignore
    assert Plan.parse("uniform-frames:64B").retrieve.count(100, 10) == 6  # type: ignore
    assert Plan.parse("uniform-frames:0.001").retrieve.count(100, 10) == 1  # type: ignore
    with pytest.raises(PlanError, match="needs a budget"):
        Plan.parse("retoken")
    with pytest.raises(PlanError, match="leave positions, unit"):
        Plan.parse("quest:64(positions=contiguous)")
    with pytest.raises(PlanError, match="depth"):
        Plan.parse("attention-select:64(depth=1.0)")


# -- places ----------------------------------------------------------------------------------------


def test_places_of_a_film_under_m_rope() -> None:
    """Two of four frames: text, 2 x 2 frames at times 0, 2, 5 and 6, text."""
    layout = Layout.of(torch.tensor([False] * 2 + [True] * 16 + [False] * 2), [Grid(4, 2, 2)])
    times = torch.tensor([0, 2, 5, 6]).repeat_interleave(4)
    rows, columns = torch.tensor([0, 0, 1, 1]).repeat(4), torch.tensor([0, 1, 0, 1]).repeat(4)
    film = torch.stack([times, rows, columns]) + 2
    text = torch.arange(2).expand(3, -1)
    positions = torch.cat([text, film, text + int(film.max()) + 1], 1)
    everything = torch.arange(20)
    assert torch.equal(contiguous_positions(layout, positions, everything), positions)
    some = torch.cat(
        [torch.arange(2), torch.arange(6, 10), torch.arange(14, 18), torch.tensor([18, 19])]
    )
    places = contiguous_positions(layout, positions, some)
    assert places[0, 2:10].tolist() == [2] * 4 + [4] * 4  # the first two times of the film
    assert places[1, 2:10].tolist() == [2, 2, 3, 3] * 2
    assert places[:, 10].tolist() == [5, 5, 5]


@given(st.sets(st.integers(0, 11), min_size=1))
@examples(30)
def test_places_count_on_with_one_axis(chosen: set[int]) -> None:
    layout = Layout.of(torch.tensor([False, True] * 6), [Grid(1, 2, 3)])
    seen = torch.tensor(sorted(chosen))
    places = contiguous_positions(layout, torch.arange(12)[None], seen)
    assert places.tolist() == [list(range(len(seen)))]


def test_a_row_sees_what_comes_before_it() -> None:
    keys, values = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    segment = GatheredSegment(keys, values, torch.tensor([2, 5, 8]))
    query = torch.randn(1, 1, 3, 4)
    output, lse = segment.attend(query, 1.0, torch.tensor([[1, 6, 9]]), None, with_lse=True)
    assert lse is not None and lse[0, 0, 0] == -math.inf and torch.all(output[0, 0, 0] == 0)

    def plain(row: int, count: int) -> Tensor:
        weights = (keys[0, 0, :count] @ query[0, 0, row]).softmax(0)
        return weights @ values[0, 0, :count]

    assert torch.allclose(output[0, 0, 1], plain(1, 2), atol=1e-6)
    assert torch.allclose(output[0, 0, 2], plain(2, 3), atol=1e-6)
