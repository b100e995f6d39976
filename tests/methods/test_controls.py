"""Full, random, text-random and uniform: controls, against plain-Python versions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conduit_kv.budget import share_out
from conduit_kv.errors import PlanError
from conduit_kv.methods.evict import PROTECTED, Full, Random, TextRandom, Uniform
from conduit_kv.methods.evict.parts import uniform_noise
from conduit_kv.methods.evict.uniform import spread, spread_over_grid
from tests.methods.views import any_view, best, kept_by, make_view

MASK = (1 << 64) - 1


def noise(seed, layer, index):
    """SplitMix64 with Python's own integers."""
    stream = seed * 0xD1342543DE82EF95 + layer * 0xDA942042E4DD58B5 + 0x632BE59BD9B4E019
    state = ((index + 1) * 0x9E3779B97F4A7C15 + stream) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    state ^= state >> 31
    return (state >> 40) / (1 << 24)


@given(st.integers(-5, 1 << 40), st.integers(0, 200), st.lists(st.integers(0, 1 << 20)))
def test_noise_is_splitmix(seed, layer, places):
    found = uniform_noise(seed, layer, torch.tensor(places, dtype=torch.long))
    assert found.tolist() == [noise(seed, layer, place) for place in places]


def test_noise_is_even_and_layers_and_seeds_differ():
    draws = {
        (seed, layer): uniform_noise(seed, layer, torch.arange(20000))
        for seed in range(3)
        for layer in range(3)
    }
    for draw in draws.values():
        assert draw.min() >= 0 and draw.max() < 1
        counts = torch.histc(draw, bins=10, min=0, max=1)
        assert (counts - 2000).abs().max() < 250
    stacked = torch.stack(list(draws.values()))
    assert (torch.corrcoef(stacked) - torch.eye(len(stacked))).abs().max() < 0.03


@given(any_view(layer=3), st.integers(0, 40), st.integers(0, 9))
def test_random_keeps_the_largest_draws(view, budget, seed):
    score = [noise(seed, view.layer, int(j)) for j in view.index]
    (kept,) = kept_by(Random(seed=seed), view, budget)
    assert kept == sorted(best(score, range(view.size), budget))


def test_random_is_the_same_in_part_and_whole():
    whole = make_view([3, (3, 4), 5])
    part = make_view([3, (3, 4), 5], rows=5, held=[0, 4, 9])
    scores, some = Random(seed=3).score(whole).token, Random(seed=3).score(part).token
    assert torch.equal(scores[part.index], some)


@given(any_view(layer=2), st.integers(0, 40), st.integers(0, 9))
def test_text_random_keeps_text_first(view, budget, seed):
    score = [noise(seed, view.layer, int(j)) for j in view.index]
    text = view.layout.text.tolist()
    always = [j for j in range(view.size) if view.index[j] < 4 or j == view.size - 1]
    free = [j for j in range(view.size) if j not in always]
    rest = budget - len(always)
    words = best(score, [j for j in free if text[j]], rest)
    looks = best(score, [j for j in free if not text[j]], rest - len(words))
    (kept,) = kept_by(TextRandom(seed=seed), view, budget)
    assert kept == sorted([*always, *words, *looks])


def slow_spread(count, size):
    """The places whose middles are evenly apart."""
    return [math.floor((i + 0.5) * size / count) for i in range(count)]


@given(st.integers(0, 60), st.integers(0, 60))
def test_spread(count, extra):
    size = count + extra
    assert spread(count, size).tolist() == slow_spread(count, size)
    assert len(set(spread(count, size).tolist())) == count


def test_uniform_on_a_whole_grid_is_a_lattice():
    cells = torch.stack(
        [torch.zeros(96, dtype=torch.long), torch.arange(96) // 12, torch.arange(96) % 12]
    )
    kept = cells[:, spread_over_grid(cells, 24)]
    assert sorted(set(kept[1].tolist())) == [1, 3, 5, 7]
    assert sorted(set(kept[2].tolist())) == [1, 3, 5, 7, 9, 11]
    assert kept.shape[1] == 24


def slow_grid(cells, count):
    """Frames, then rows, then columns, each evenly apart."""

    def shared(total, sizes):
        # In proportion to the sizes, rounded by largest remainder.
        exact = [total * size / sum(sizes) for size in sizes]
        counts = [math.floor(e + 1e-9) for e in exact]
        order = sorted(range(len(sizes)), key=lambda i: (counts[i] - exact[i], i))
        for i in order[: total - sum(counts)]:
            counts[i] += 1
        return counts

    frames = sorted({f for f, _, _ in cells})
    if not count:
        return set()
    if count < len(frames):
        counts = {frames[i]: 1 for i in slow_spread(count, len(frames))}
    else:
        sizes = [sum(f == frame for f, _, _ in cells) for frame in frames]
        floors = share_out(count, sizes, sizes, [1] * len(frames))
        counts = dict(zip(frames, floors, strict=True))
    kept = set()
    for frame, mine in counts.items():
        rows = sorted({r for f, r, _ in cells if f == frame})
        columns = [sorted(c for f, r, c in cells if (f, r) == (frame, row)) for row in rows]
        lines = max(round(math.sqrt(mine * len(rows) / max(map(len, columns)))), 1)
        lines = min(lines, mine, len(rows))
        while sum(len(columns[i]) for i in slow_spread(lines, len(rows))) < mine:
            lines += 1
        chosen = slow_spread(lines, len(rows))
        for i, number in zip(chosen, shared(mine, [len(columns[i]) for i in chosen]), strict=True):
            places = slow_spread(number, len(columns[i])) if number else []
            kept |= {(frame, rows[i], columns[i][place]) for place in places}
    return kept


@settings(max_examples=200)
@given(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7), st.data())
def test_uniform_over_any_cells_gives_the_count_and_covers_them(frames, rows, columns, data):
    every = [(f, r, c) for f in range(frames) for r in range(rows) for c in range(columns)]
    some = data.draw(st.lists(st.sampled_from(every), unique=True, min_size=1))
    cells = torch.tensor(some).T
    count = data.draw(st.integers(0, len(some)))
    kept = spread_over_grid(cells, count)
    assert len(set(kept.tolist())) == len(kept) == count
    assert {some[i] for i in kept.tolist()} == slow_grid(some, count)
    if len(some) == len(every) and count:
        # Frames get as many as each other, and rows used too.
        per_frame = torch.bincount(cells[0][kept], minlength=frames)
        assert per_frame.max() - per_frame.min() <= 1
        for frame in range(frames):
            used = torch.bincount(cells[1][kept][cells[0][kept] == frame], minlength=rows)
            used = used[used > 0]
            assert not len(used) or used.max() - used.min() <= 1


def test_uniform_shares_over_images_and_keeps_text():
    view = make_view([3, (4, 4), 2, (2, 4), 3])
    (kept,) = kept_by(Uniform(), view, 8 + 6)
    places = view.layout.image[torch.tensor(kept)].tolist()
    assert [places.count(image) for image in (-1, 0, 1)] == [8, 4, 2]
    (kept,) = kept_by(Uniform(of="visual"), view, 6)
    places = view.layout.image[torch.tensor(kept)].tolist()
    assert [places.count(image) for image in (-1, 0, 1)] == [8, 4, 2]
    # Less than the text: sinks and last token, and text evenly apart.
    (kept,) = kept_by(Uniform(), make_view([14, (2, 2), 1]), 8)
    assert kept == [0, 1, 2, 3, 5, 9, 12, 18]


@given(any_view(), st.integers(0, 40))
def test_uniform_counts(view, budget):
    (kept,) = kept_by(Uniform(), view, budget)
    tier = Uniform().score(view).tier
    always = int((tier == PROTECTED).sum())
    assert len(kept) == min(max(budget, always), view.size)
    text = [j for j in range(view.size) if tier[j] >= 1]
    assert len(set(kept) & set(text)) == min(len(text), max(budget, always))


def test_full_keeps_everything_and_takes_nothing_else():
    view = make_view([3, (2, 2), 3])
    assert kept_by(Full(), view, 10) == [list(range(10))]
    assert Full().is_identity
    for wrong in ({"budget": 0.5}, {"budget": 12}, {"cover": 0.5}):
        with pytest.raises(PlanError):
            Full(**wrong)
    with pytest.raises(PlanError, match="cover"):
        Uniform(0.5, cover=0.5)
