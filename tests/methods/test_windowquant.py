"""WindowQuant: windows, similarity, bits, the guard and later questions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv import PlanError
from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.hold import RandomWindows, WindowQuant
from conduit_kv.plan import Plan
from tests.contracts.helpers import as_it_was, converse, examples, tokens, turn
from tests.methods.views import make_layout
from tests.tiny import tiny_model


@pytest.mark.parametrize("plan", [
    "windowquant:3.17", "windowquant", "windowquant:4(bits=[3,4,8], window=32)",
    "windowquant:2.2(window=frame, similarity=max, tolerance=0.1, research=true)",
    "random-windows:3.17(seed=4)", "kivi:2", "kivi:4(residual=0)", "rtn:3(of=prompt)", "fp8",
])  # fmt: skip
def test_plans_are_read_back(plan):
    assert str(Plan.parse(plan)) == str(Plan.parse(str(Plan.parse(plan))))
    assert Plan.parse(plan).hold is not None


@pytest.mark.parametrize(("plan", "message"), [
    ("windowquant:1.5", "no average of 1.5"),
    ("windowquant:17", "no average"),
    ("windowquant:3(bits=[2,4])", "low, mid, high"),
    ("windowquant:3(bits=[4,2,16])", "ascending"),
    ("windowquant:3(bits=[2,5,16])", "cannot be packed"),
    ("windowquant:3(window=0)", "window=0"),
    ("windowquant:3(window=column)", "does not fit"),
    ("kivi:5", "5 bits cannot be packed"),
    ("kivi:2.5", "whole number"),
    ("kivi", "write kivi:4"),
    ("kivi:4(bits=2)", "budget twice"),
    ("rtn:4(keep=2, bits=3)", "the same"),
    ("fp8:8", "takes no budget"),
    ("kivi:4 + rtn:4", "both act in the stage hold"),
])  # fmt: skip
def test_what_cannot_be_held_is_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        Plan.parse(plan)


def test_windows_by_row_frame_and_number():
    layout = make_layout([2, (2, 3), 1, (1, 4)])
    rows = [-1, -1, 0, 0, 0, 1, 1, 1, -1, 2, 2, 2, 2]
    assert WindowQuant(3.0).windows(layout).tolist() == rows
    assert WindowQuant(3.0, window="row").windows(layout).tolist() == rows
    frames = [-1, -1, 0, 0, 0, 0, 0, 0, -1, 1, 1, 1, 1]
    assert WindowQuant(3.0, window="frame").windows(layout).tolist() == frames
    by_four = [-1, -1, 0, 0, 0, 0, 1, 1, -1, 2, 2, 2, 2]
    assert WindowQuant(3.0, window=4).windows(layout).tolist() == by_four
    video = Layout.of(torch.ones(12, dtype=torch.bool), [Grid(3, 2, 2)])
    assert WindowQuant(3.0).windows(video).tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert WindowQuant(3.0, window="row").windows(video).tolist() == [n // 2 for n in range(12)]
    assert WindowQuant(3.0).windows(Layout.text_only(3)).tolist() == [-1] * 3
    longer = layout.extend(make_layout([1, (2, 2)]))
    assert WindowQuant(3.0).windows(longer).tolist()[: len(rows)] == rows


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    average=st.floats(2, 15.9),
    seed=st.integers(0, 999),
)
@examples(60)
def test_the_average_is_the_largest_that_fits(sizes, average, seed):
    similarity = torch.rand(len(sizes), generator=torch.Generator().manual_seed(seed))
    bits = WindowQuant(average).assign(similarity, torch.tensor(sizes)).tolist()
    order = sorted(range(len(sizes)), key=lambda w: -float(similarity[w]))
    ranked = [bits[w] for w in order]
    assert ranked == sorted(ranked, reverse=True)  # the more similar never has fewer bits
    assert ranked.count(16) <= 0.05 * len(sizes)
    used = sum(b * n for b, n in zip(bits, sizes, strict=True))
    assert used <= average * sum(sizes) + 1e-6
    if ranked[-1] == 2:  # the next window does not fit at four bits
        following = order[len(ranked) - ranked.count(2)]
        assert used + 2 * sizes[following] > average * sum(sizes) - 1e-6


def test_thresholds():
    similarity = torch.tensor([0.0, 0.59, 0.61, 0.89, 0.91, 1.0])
    bits = WindowQuant(alpha=0.6, beta=0.1).assign(similarity, torch.ones(6, dtype=torch.long))
    assert bits.tolist() == [2, 2, 4, 4, 16, 16]
    same = WindowQuant().assign(torch.ones(3), torch.ones(3, dtype=torch.long))
    assert same.tolist() == [4, 4, 4]


@pytest.mark.parametrize("kind", ["mean", "max"])
@pytest.mark.parametrize("family", ["llava", "qwen3-vl"])
def test_similarity_is_the_cosine_of_means(family, kind):
    model, _ = tiny_model(family)
    inputs = turn(family, 2)
    caught = []
    take_in = type(converse(model, "full", []).cache).take_in

    def listening(self, embeddings):
        caught.append(embeddings)
        take_in(self, embeddings)

    from conduit_kv.engine.request import RequestCache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestCache, "take_in", listening)
        cache = converse(model, f"windowquant:3(similarity={kind})", [inputs]).cache
    found = cache.holding._similarity[0]
    layout, embeddings = cache.progress.layouts[0], caught[0][0].double()
    windows = WindowQuant(3.0).windows(layout)
    assert len(found) == int(windows.max()) + 1
    text = [embeddings[t] for t in range(len(layout)) if not layout.visual[t]]
    for window in range(len(found)):
        mine = [embeddings[t] for t in range(len(layout)) if windows[t] == window]
        mean = sum(mine) / len(mine)
        if kind == "mean":
            wanted = torch.cosine_similarity(mean, sum(text) / len(text), dim=0)
        else:
            wanted = max(torch.cosine_similarity(mean, t, dim=0) for t in text)
        assert float(found[window]) == pytest.approx(float(wanted), abs=1e-5)


def bits_of_tokens(cache, layer=0):
    """Token to bits, in one layer."""
    found = {}
    for segment in cache.layers[layer].frozen:
        for part in segment.rows[0]:
            found |= dict.fromkeys(part.index.tolist(), part.store.bits)
    return found


def test_the_similar_windows_get_the_bits():
    model, _ = tiny_model("qwen3-vl")
    cache = converse(model, "windowquant:3(tolerance=0)", [turn("qwen3-vl", 3)]).cache
    layout = cache.progress.layouts[0]
    windows, similarity = WindowQuant(3.0).windows(layout), cache.holding._similarity[0]
    by_bits = {2: [], 4: []}
    for token, bits in bits_of_tokens(cache).items():
        by_bits[bits].append(float(similarity[windows[token]]))
    assert by_bits[2] and by_bits[4] and max(by_bits[2]) <= min(by_bits[4])
    chance = converse(model, "random-windows:3(tolerance=0)", [turn("qwen3-vl", 3)]).cache
    assert bits_of_tokens(chance) != bits_of_tokens(cache)
    assert sorted(bits_of_tokens(chance).values()) == sorted(bits_of_tokens(cache).values())
    assert (
        RandomWindows(3.0)._chance(layout).tolist() == RandomWindows(3.0)._chance(layout).tolist()
    )


def test_the_guard_gives_a_layer_one_level_more():
    model, _ = tiny_model("llava")
    free = converse(model, "windowquant:2(tolerance=0)", [turn("llava", 2)])
    tight = converse(model, "windowquant:2(tolerance=0.00001)", [turn("llava", 2)])
    loose = converse(model, "windowquant:2(tolerance=1000)", [turn("llava", 2)])
    assert set(bits_of_tokens(free.cache).values()) == {2}
    assert set(bits_of_tokens(tight.cache).values()) == {4}
    assert set(bits_of_tokens(loose.cache).values()) == {2}
    assert "one level more" in tight.notes[0] and not free.notes and not loose.notes
    errors = tight.cache.holding.guarded
    assert set(errors) == {(layer, 0) for layer in range(4)}
    # The error is that of the attention output of the last eight rows.
    middle = sorted(errors.values())[1:3]
    between = converse(
        model, f"windowquant:2(tolerance={sum(middle) / 2})", [turn("llava", 2)]
    ).cache.holding.guarded
    assert len(between) == 2 and set(between.values()) == set(sorted(errors.values())[2:])


def test_the_search_belongs_to_the_first_question():
    model, _ = tiny_model("qwen3-vl")
    first, second = turn("qwen3-vl", 3), tokens(*range(90, 110))
    frozen = converse(model, "windowquant:3(tolerance=0)", [first]).cache
    before = bits_of_tokens(frozen)
    converse(model, "windowquant:3(tolerance=0)", [second], cache=frozen)
    assert bits_of_tokens(frozen) == before

    plan = "windowquant:3(tolerance=0, research=true)"
    searching = converse(model, plan, [first])
    assert bits_of_tokens(searching.cache) == before
    again = converse(model, plan, [second], cache=searching.cache)
    after = bits_of_tokens(again.cache)
    windows = WindowQuant(3.0).windows(again.cache.progress.layouts[0])
    similarity = again.cache.holding._similarity[0]
    low, high = (
        [float(similarity[windows[t]]) for t, bits in after.items() if bits == level]
        for level in (2, 4)
    )
    assert max(low) <= min(high) and set(after) == set(before)
    assert any("full precision" in note for note in again.notes)
    # Packed from the copy, not from the codes: equal to packing the first time.
    with as_it_was(model):
        plain = converse(model, "full", [first]).cache
    for token in list(after)[:5]:
        layer = again.cache.layers[0]
        at = layer.held(0, 0).tolist().index(token)
        _, keys, _ = layer.read(0, [0])
        exact = plain.layers[0].tail.keys[0, 0, token]
        assert (keys[0, at] - exact).abs().max() < 2.0


def test_new_images_are_searched_by_their_own_turn():
    model, _ = tiny_model("llava")
    plan = "windowquant:3(tolerance=0)"
    run = converse(model, plan, [turn("llava", 1)])
    before = bits_of_tokens(run.cache)
    converse(model, plan, [turn("llava", 2, first=False, seed=3)], cache=run.cache)
    after = bits_of_tokens(run.cache)
    assert {t: after[t] for t in before} == before and len(after) > len(before)
