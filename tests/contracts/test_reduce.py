"""Reduce and merge: ids, masks, positions and deepstack features shrink together."""

from __future__ import annotations

import pytest
import torch

from conduit_kv import compress
from conduit_kv.compat import cache_name
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import registry
from conduit_kv.plan import Plan
from tests.contracts.helpers import (
    TOLERANCE,
    active,
    as_it_was,
    batch_and_singles,
    converse,
    error,
    held,
    joined,
    plain_logits,
    reference,
    same_held,
    tokens,
    turn,
)
from tests.tiny import FAMILY_NAMES, tiny_model

REDUCE = tuple(name for name, method in registry().items() if method.stage == "reduce")
MERGING = {"visionzip", "tome", "nuwa-reduce"}
LIGHT = "lightkv(layers=[1,2,3], windows=[2,1,1], rho=0.3, positions=keep)"


@pytest.mark.parametrize("method", REDUCE)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_what_is_kept_is_the_same_everywhere(family, method):
    model, _ = tiny_model(family)
    inputs = turn(family, 2)
    run = converse(model, f"{method}:0.5", [inputs, tokens(70)])
    layout = run.cache.progress.layouts[0]
    visual = int(layout.visual.sum())
    ran = active(run.cache)
    assert int((ran[0] & layout.visual).sum()) == round(0.5 * visual)
    per_image = layout.counts(torch.nonzero(ran[0]).flatten())
    for kept, size in zip(per_image, layout.counts(), strict=True):
        assert abs(kept - size * round(0.5 * visual) / visual) < 1
    for layer, rows in zip(run.cache, ran, strict=True):
        assert torch.equal(layer.held(0, 0), torch.nonzero(rows).flatten())
    gone = run.logits.isnan().any(-1)
    assert torch.equal(~gone, ran[0])
    assert run.cache.get_seq_length() == inputs["input_ids"].shape[1] + 1


@pytest.mark.parametrize("method", ["divprune", "cdpruner", "random-reduce", "uniform-reduce"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_choosing_equals_a_forward_of_the_tokens_chosen(family, method):
    model, _ = tiny_model(family)
    parts = [
        turn(family, 2),
        tokens(70),
        turn(family, 1, " And this?", seed=1, first=False),
        tokens(72),
    ]
    for more in ("", " + reroute:0.7", " + pdrop:0.7 + tgv-kv:0.5"):
        run = converse(model, f"{method}:0.6{more}", parts)
        expected = reference(model, joined(parts), run.steps, active(run.cache))
        keep = ~run.logits.isnan().any(-1)
        assert error(run.logits[keep], expected[keep]) < TOLERANCE


@pytest.mark.parametrize("method", [*REDUCE, LIGHT])
@pytest.mark.parametrize("family", ["llava", "qwen3-vl", "idefics3"])
def test_batches_and_chunks(family, method):
    model, _ = tiny_model(family)
    batch, singles = batch_and_singles(family, (2, 0, 1))
    plan = method if "(" in method else f"{method}:0.5"
    with as_it_was(model), compress(model, plan) as run:
        together = model(**batch).logits
    for row, single in enumerate(singles):
        alone = converse(model, plan, [single], chunk=7)
        assert same_held(held(run.cache, row), held(alone.cache))
        mine = together[row][batch["attention_mask"][row].bool()]
        keep = ~alone.logits.isnan().any(-1)
        assert error(mine[keep], alone.logits[keep]) < TOLERANCE


@pytest.mark.parametrize("method", REDUCE)
def test_identity_and_targets_beyond_all(method):
    model, _ = tiny_model("qwen2.5-vl")
    inputs = turn("qwen2.5-vl", 1)
    for budget in ("1.0", "1000"):
        run = converse(model, f"{method}:{budget}", [inputs])
        assert error(run.logits, plain_logits(model, inputs)[0]) < TOLERANCE


def test_one_token_is_left_of_the_smallest_budget():
    model, _ = tiny_model("llava")
    for method in REDUCE:
        run = converse(model, f"{method}:1", [turn("llava", 2), tokens(70)])
        visual = run.cache.progress.layouts[0].visual
        assert int((active(run.cache)[0] & visual).sum()) == 1


def test_nuwa_is_two_stages_of_one_mean():
    plan = Plan.parse("nuwa:0.3")
    assert [str(method) for method in plan] == [
        "nuwa-reduce:0.4",
        "delete:0.7499999999999999(rank=nuwa)",
    ] or plan.reduce.budget.value == pytest.approx(0.4)
    for text in ("nuwa:0.6", "nuwa:0.9", "nuwa:20", "nuwa(keep=0.5)"):
        model, _ = tiny_model("llava")
        cache = converse(model, text, [turn("llava", 2)]).cache
        visual = cache.progress.layouts[0].visual
        ran = [int((rows & visual).sum()) for rows in active(cache)]
        target = Plan.parse(text.replace("nuwa", "delete", 1)).route.mean_active(int(visual.sum()))
        assert abs(sum(ran) / 4 - target) <= 0.75
    with pytest.raises(PlanError, match="budget alone"):
        Plan.parse("nuwa:0.3(layers=[2])")
    with pytest.raises(PlanError, match="both act in the stage route"):
        Plan.parse("nuwa:0.3 + reroute:0.5")


# -- LightKV -------------------------------------------------------------------------------------


def capture(model, layer, hidden, rotary):
    """A layer's queries and keys, through an attention function of the test's own."""
    from transformers import AttentionInterface

    seen = {}

    def look(module, query, key, value, mask, scaling=None, **_):
        seen.update(query=query, key=key, scaling=scaling)
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2), None

    AttentionInterface.register("capture", look)
    config = layer.self_attn.config
    before = config._attn_implementation_internal
    config._attn_implementation_internal = "capture"
    try:
        layer.self_attn(
            hidden_states=layer.input_layernorm(hidden), position_embeddings=rotary,
            attention_mask=None, **{cache_name(type(layer.self_attn)): None},
        )  # fmt: skip
    finally:
        config._attn_implementation_internal = before
    return seen["query"][0], seen["key"][0], seen["scaling"]


@pytest.mark.parametrize("weights", ["query-softmax", "key-softmax"])
@pytest.mark.parametrize(
    ("family", "positions"),
    [("llava", "renumber"), ("llava", "keep"), ("qwen3-vl", "auto")],
)
def test_lightkv_is_its_formula(family, positions, weights):
    """Token by token in plain loops, on the plain model's own layers."""
    from conduit_kv.families import family_of
    from tests.contracts.helpers import eager
    from tests.families.helpers import reaching_text_model

    model, _ = tiny_model(family)
    adapter = family_of(model)
    text_model = adapter.text_model(model)
    inputs = turn(family, 2, sizes=((56, 56), (42, 56)))
    layers, windows, rho = (1, 3), (2, 1), 0.3
    plan = (
        f"lightkv(layers=[1,3], windows=[2,1], rho={rho}, positions={positions}, weights={weights})"
    )
    run = converse(model, plan, [inputs, tokens(70), tokens(71)])
    layout = run.cache.progress.layouts[0].select(torch.arange(inputs["input_ids"].shape[1]))
    renumber = positions != "keep" and adapter.position_axes == 1
    given = reaching_text_model(adapter, model, model, **inputs)
    with torch.inference_mode(), eager(text_model):
        hidden = given["inputs_embeds"]
        positions_ = given.get("position_ids")
        if positions_ is None:
            positions_ = torch.arange(len(layout))[None]
        positions_ = positions_[-3:] if positions_.dim() == 3 else positions_
        deepstack = given.get("deepstack_visual_embeds") or []
        given_positions = positions_
        query = key = scaling = None
        left = list(range(len(layout)))
        states = hidden[0]
        for number, layer in enumerate(text_model.layers):
            if number in layers:
                per_side = windows[layers.index(number)]
                weight = _slow_weights(
                    query, key, scaling, [bool(layout.text[t]) for t in left], weights
                )
                states, left = _slow_merge(states, left, layout, per_side, rho, weight)
                if renumber:
                    positions_ = torch.arange(len(left))[None]
                else:
                    positions_ = given_positions[..., left]
            rotary = text_model.rotary_emb(states[None], positions_)
            if number + 1 in layers:
                query, key, scaling = capture(model, layer, states[None], rotary)
            size = len(left)
            mask = torch.zeros(size, size).masked_fill(
                ~torch.ones(size, size).tril().bool(), torch.finfo(torch.float32).min
            )
            output = layer(
                states[None], attention_mask=mask[None, None], position_ids=None,
                position_embeddings=rotary, use_cache=False,
            )  # fmt: skip
            states = (output[0] if isinstance(output, tuple) else output)[0]
            if number < len(deepstack):
                order = torch.nonzero(layout.visual).flatten().tolist()
                for place, token in enumerate(left):
                    if layout.visual[token]:
                        states[place] += deepstack[number][order.index(token)]
            kept = run.cache.held(number)
            assert kept[kept < len(layout)].tolist() == left
        logits = model.lm_head(text_model.norm(states))
    assert len(left) < len(layout)
    assert error(run.logits[left], logits) < TOLERANCE


def _slow_weights(query, key, scaling, text, softmax):
    heads, size, _ = query.shape
    total = [0.0] * size
    for head in range(heads):
        own = key[head * len(key) // heads]
        logits = (query[head] @ own.T * scaling).double()
        for row in range(size):
            for column in range(size):
                if text[column]:
                    over = logits[:, column] if softmax == "query-softmax" else logits[row]
                    total[row] += float((logits[row, column] - over.logsumexp(0)).exp())
    return total


def _slow_merge(states, left, layout, per_side, rho, weight):
    gone, into = set(), {}
    for image, grid in enumerate(layout.grids):
        for frame in range(grid.frames):
            mine = [
                p
                for p, t in enumerate(left)
                if layout.image[t] == image and layout.frame[t] == frame
            ]
            if len(mine) < 8 * per_side**2:
                continue
            views = [v for v in grid.views if v.frame == frame]
            rows = max((v.row + v.rows for v in views), default=grid.rows)
            columns = max((v.columns for v in views), default=grid.columns)

            def window(value, length):
                sizes = [length // per_side + (k < length % per_side) for k in range(per_side)]
                return next(k for k in range(per_side) if value < sum(sizes[: k + 1]))

            for down in range(per_side):
                for across in range(per_side):
                    inside = [
                        p for p in mine
                        if window(int(layout.row[left[p]]), rows) == down
                        and window(int(layout.column[left[p]]), columns) == across
                    ]  # fmt: skip
                    a, b = inside[::2], inside[1::2]
                    if not b:
                        continue
                    found = []
                    for p in a:
                        likeness = [
                            float(torch.cosine_similarity(states[p], states[q], dim=0)) for q in b
                        ]
                        best = max(range(len(b)), key=lambda k: likeness[k])
                        found.append((-likeness[best], p, b[best]))
                    for _, p, q in sorted(found)[: int(rho * len(inside))]:
                        gone.add(p)
                        into.setdefault(q, []).append(p)
    merged = states.clone()
    for q, sources in into.items():
        total = weight[q] + sum(weight[p] for p in sources)
        merged[q] = (weight[q] * states[q] + sum(weight[p] * states[p] for p in sources)) / total
    keep = [p for p in range(len(left)) if p not in gone]
    return merged[keep], [left[p] for p in keep]


def test_renumbered_positions_go_on_in_decoding_and_turns():
    """A token decoded at once with the prompt sees the same as one decoded after it."""
    model, _ = tiny_model("llava")
    plan = "lightkv(layers=[1,3], windows=[1,1], rho=0.5, positions=renumber)"
    inputs = turn("llava", 2)
    run = converse(model, plan, [inputs, tokens(70)])
    again = converse(model, plan, [inputs, tokens(70)], chunk=5)
    assert error(again.logits[-1:], run.logits[-1:]) < TOLERANCE
    for number, layer in enumerate(run.cache):
        assert run.cache.shifts(number) == layer.skipped
    three = converse(model, plan, [inputs, tokens(70, 71, 72)])
    one_by_one = converse(model, plan, [inputs, tokens(70), tokens(71), tokens(72)])
    assert error(three.logits[-3:], one_by_one.logits[-3:]) < TOLERANCE
    beams = run.cache.fork()
    beams.batch_repeat_interleave(2)
    assert beams.shifts(3) == run.cache.shifts(3) * 2


def test_lightkv_targets_and_refusals():
    model, _ = tiny_model("llava")
    big = turn("llava", 1, sizes=((112, 112),))
    small = turn("llava", 1, sizes=((28, 28),))
    run = converse(model, "lightkv:0.7(windows=[1])", [big])
    schedule = run.cache.flows[0].schedules[0]
    assert abs(schedule.average - 0.7 * schedule.visual) * 4 <= schedule.visual / 2
    run = converse(model, "lightkv(layers=[1], windows=[4])", [small])
    assert any("too small for 4 x 4 windows" in note for note in run.notes)
    assert error(run.logits, plain_logits(model, small)[0]) < TOLERANCE
    assert converse(model, "lightkv:0.5(rho=0)", [small]).cache.flows == []
    with pytest.raises(PlanError, match="The smallest is"):
        converse(model, "lightkv:0.2(windows=[1])", [big])
    with pytest.raises(PlanError, match="fewer windows"):
        converse(model, "lightkv:0.5(windows=[4,2,1,1])", [big])
    with pytest.raises(PlanError, match="no meaning for positions of 3 axes"):
        converse(
            tiny_model("qwen2-vl")[0],
            "lightkv(layers=[1], windows=[1], positions=renumber)",
            [turn("qwen2-vl", 1)],
        )
    for text, words in {
        "lightkv:0.5(rho=0.6)": "not in",
        "lightkv:0.5(layers=[1,2,3])": "take one",
        "lightkv(layers=[1,2])": "as many windows",
    }.items():
        with pytest.raises(PlanError, match=words):
            Plan.parse(text)


@pytest.mark.parametrize("family", ["llava", "qwen2.5-vl"])
def test_merged_prompts_compose_with_evict_and_turns(family):
    model, _ = tiny_model(family)
    parts = [turn(family, 2), tokens(70), turn(family, 1, " So?", seed=2, first=False), tokens(71)]
    for plan in (
        f"{LIGHT} + tgv-kv:0.5",
        f"tome:0.6 + {LIGHT}",
        "visionzip:0.6 + reroute:0.7 + h2o:0.5",
    ):
        run = converse(model, plan, parts)
        again = converse(model, plan, parts, chunk=9)
        keep = ~run.logits.isnan().any(-1)
        assert bool(torch.isfinite(run.logits[-1]).all())
        assert error(run.logits[keep], again.logits[keep]) < TOLERANCE
        assert same_held(held(run.cache), held(again.cache))
