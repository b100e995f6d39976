"""Routing: the loop equals one forward that is given, layer by layer, the active rows alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conduit_kv import compress
from conduit_kv.compat import cache_name
from conduit_kv.engine.cost import Cost, Work
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import PlanError
from conduit_kv.families import family_of
from conduit_kv.plan import Plan
from conduit_kv.stack import Stream
from tests.contracts.helpers import (
    FLOWS,
    TOLERANCE,
    active,
    as_it_was,
    batch_and_singles,
    converse,
    eager,
    error,
    examples,
    held,
    joined,
    plain_logits,
    reference,
    same_held,
    tokens,
    turn,
    with_cache,
)
from tests.families.helpers import reaching_text_model
from tests.tiny import FAMILY_NAMES, tiny_model
from tests.tiny.parts import picture

ROUTES = {
    "fastv": "fastv:0.7",
    "pdrop": "pdrop:0.6",
    "reroute-fastv": "reroute:0.7(rank=fastv)",
    "reroute-pdrop": "reroute:0.6",
    "reroute-nuwa": "reroute:0.7(rank=nuwa)",
    "delete-nuwa": "delete:0.7(rank=nuwa)",
    "reroute-random": "reroute:0.6(rank=random)",
    "delete-uniform": "delete:0.6(rank=uniform)",
    "fastv-original": "fastv:0.7(scores_from=previous)",
}
"""One plan per rule and action."""


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_conversation_equals_a_forward_of_the_active_rows(family, route):
    """Prefill, decoding, a later turn with an image and one without."""
    model, _ = tiny_model(family)
    parts = [
        turn(family, 2),
        tokens(70),
        turn(family, 1, " And this?", seed=1, first=False),
        tokens(72),
        turn(family, 0, " Is it red?", first=False),
        tokens(74),
    ]
    run = converse(model, ROUTES[route], parts)
    ran = active(run.cache)
    expected = reference(model, joined(parts), run.steps, ran)
    gone = run.logits.isnan().any(-1)
    assert error(run.logits[~gone], expected[~gone]) < TOLERANCE
    visual = run.cache.progress.layouts[0].visual
    assert not bool(gone[~visual].any())
    if run.cache.flows[0].method.waits:
        assert not bool(gone.any())
    else:
        assert torch.equal(~gone, ran[-1])
    for layer, rows in zip(run.cache, ran, strict=True):
        assert torch.equal(layer.held(0, 0), torch.nonzero(rows).flatten())
        assert layer.reached(0) == int(rows.sum())
    counts = [int((rows & visual).sum()) for rows in ran]
    assert min(counts) < int(visual.sum())


@pytest.mark.parametrize("route", ["pdrop", "reroute-pdrop", "reroute-fastv"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_ranking_is_the_newest_tokens_attention(family, route):
    """Every decision again, from the weights of Transformers' own eager attention."""
    model, _ = tiny_model(family)
    inputs = turn(family, 2)
    run = converse(model, ROUTES[route], [inputs])
    flow = run.cache.flows[0]
    schedule = flow.schedules[0]
    adapter = family_of(model)
    text = adapter.text_model(model)
    given = reaching_text_model(adapter, model, model, **inputs)
    visual = run.cache.progress.layouts[0].visual
    pool = torch.ones(len(visual), dtype=torch.bool)
    rows = torch.arange(len(visual))
    decisions = {decision.layer: decision.active[0] for decision in flow.decisions}
    assert tuple(decisions) == schedule.layers
    with torch.inference_mode(), eager(text):
        hidden = given["inputs_embeds"]
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.arange(len(visual))[None]
        rotary = text.rotary_emb(hidden, positions[-3:] if positions.dim() == 3 else positions)
        deepstack = given.get("deepstack_visual_embeds") or []
        for number, layer in enumerate(text.layers):
            if number in decisions:
                candidates = torch.nonzero(pool).flatten()
                weights = _attention(layer, hidden, rotary, candidates)[0, :, -1].mean(0)
                score = torch.full((len(visual),), -1.0)
                score[candidates] = weights
                score[~visual] = -1.0
                count = schedule.counts[schedule.layers.index(number)]
                ordered, order = torch.sort(score, descending=True)
                if ordered[count - 1] - ordered[count] > 1e-5:
                    assert decisions[number].tolist() == sorted(order[:count].tolist())
                chosen = torch.zeros_like(visual)
                chosen[decisions[number]] = True
                rows = torch.nonzero(chosen | ~visual).flatten()
                if not flow.method.waits:
                    pool = chosen | ~visual
            output = _layer(layer, hidden, rotary, rows)
            hidden = hidden.index_copy(1, rows, output)
            if number < len(deepstack):
                hidden = hidden.clone()
                hidden[given["visual_pos_masks"]] += deepstack[number]


def _mask(size):
    hidden = ~torch.ones(size, size).tril().bool()
    return torch.zeros(1, 1, size, size).masked_fill(hidden, torch.finfo(torch.float32).min)


def _attention(layer, hidden, rotary, rows):
    _, weights = layer.self_attn(
        hidden_states=layer.input_layernorm(hidden[:, rows]),
        position_embeddings=tuple(part[..., rows, :] for part in rotary),
        attention_mask=_mask(len(rows)),
        **{cache_name(type(layer.self_attn)): None},
    )
    return weights


def _layer(layer, hidden, rotary, rows):
    output = layer(
        hidden[:, rows],
        attention_mask=_mask(len(rows)),
        position_ids=None,
        position_embeddings=tuple(part[..., rows, :] for part in rotary),
        use_cache=False,
    )
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("route", ["pdrop", "reroute-pdrop", "reroute-fastv", "reroute-nuwa"])
@pytest.mark.parametrize("family", ["llava", "qwen2.5-vl", "qwen3-vl"])
def test_stage_by_stage_is_bit_identical_to_layer_by_layer(family, route, monkeypatch):
    """The slow form gathers and scatters around every layer."""
    model, _ = tiny_model(family)
    inputs, _ = batch_and_singles(family)
    runs = []
    for slow in (False, True):
        if slow:
            run_layer = Stream.run

            def around(self, number, step, run_layer=run_layer):
                if self.columns is not None:
                    self.activate(self.columns)
                run_layer(self, number, step)

            monkeypatch.setattr(Stream, "run", around)
        with as_it_was(model), compress(model, ROUTES[route]) as run:
            runs.append((model(**inputs).logits, run.cache))
    (fast, cache), (slow, other) = runs
    assert torch.equal(fast.nan_to_num(7.0), slow.nan_to_num(7.0))
    for row in range(cache.progress.batch):
        assert same_held(held(cache, row), held(other, row))
        for mine, its in zip(cache, other, strict=True):
            for one, two in zip(mine.read(row, [0, 1]), its.read(row, [0, 1]), strict=True):
                assert torch.equal(one, two)


@pytest.mark.parametrize("route", ["pdrop", "reroute-pdrop", "fastv-original"])
@pytest.mark.parametrize("family", ["llava-next", "qwen2.5-vl", "qwen3-vl", "idefics3"])
def test_a_batch_and_chunks_equal_one_by_one(family, route):
    model, _ = tiny_model(family)
    batch, singles = batch_and_singles(family, (2, 0, 1))
    with as_it_was(model), compress(model, ROUTES[route]) as run:
        together = model(**batch).logits
    for row, single in enumerate(singles):
        for chunk in (None, 7):
            alone = converse(model, ROUTES[route], [single], chunk=chunk)
            assert same_held(held(run.cache, row), held(alone.cache))
            mine = together[row][batch["attention_mask"][row].bool()]
            keep = ~alone.logits.isnan().any(-1)
            assert torch.equal(keep, ~mine.isnan().any(-1))
            assert error(mine[keep], alone.logits[keep]) < TOLERANCE


@pytest.mark.parametrize("family", ["llava", "qwen3-vl", "idefics3"])
def test_padding_on_the_right_changes_nothing(family):
    model, processor = tiny_model(family)
    processor.tokenizer.padding_side = "right"
    try:
        batch, singles = batch_and_singles(family, (1, 2))
    finally:
        processor.tokenizer.padding_side = "left"
    for plan in ("reroute:0.6", "fastv:0.7(scores_from=previous)"):
        with as_it_was(model), compress(model, plan) as run:
            model(**batch)
        for row, single in enumerate(singles):
            assert same_held(held(run.cache, row), held(converse(model, plan, [single]).cache))


@pytest.mark.parametrize("rank", ["fastv", "pdrop", "nuwa", "random"])
def test_equal_counts_cost_the_same_whatever_is_done_with_the_others(rank):
    """K/V bytes and FLOPs of delete and reroute are equal, but for the ranking."""
    model, _ = tiny_model("qwen2.5-vl")
    family = family_of(model)
    cost = Cost.of(family, family.text_model(model))
    found = []
    for action in ("delete", "reroute"):
        plan = f"{action}(rank={rank}, layers=[1,2,3], shares=[0.8,0.5,0.2])"
        cache = converse(model, plan, [turn("qwen2.5-vl", 2)]).cache
        used, work = cache.bytes_in_use(), Work.of(cache, cost)
        found.append((used["keys"], used["values"], work.prefill.attention, work.prefill.mlp))
        ranked = work.prefill.ranking
        full = converse(model, "full", [turn("qwen2.5-vl", 2)]).cache
        assert Work.of(full, cost).prefill == work.full_prefill
        assert (ranked > 0) == (rank != "random")
        assert work.prefill.mlp < work.full_prefill.mlp
        assert work.step.attention < work.full_step.attention
    assert found[0] == found[1]


@pytest.mark.parametrize("route", ["fastv", "pdrop", "reroute-pdrop", "reroute-random"])
@pytest.mark.parametrize("evict", ["tgv-kv:0.3", "ada-kv:0.4(window=4, kernel=3)", "h2o:12"])
@pytest.mark.parametrize("family", ["llava", "qwen3-vl", "internvl3"])
def test_evict_after_route(family, route, evict):
    """The budget counts the tokens that reached each layer; what follows is a masked forward."""
    model, _ = tiny_model(family)
    parts = [turn(family, 2), tokens(70), turn(family, 1, " So?", seed=2, first=False), tokens(71)]
    run = converse(model, f"{ROUTES[route]} + {evict}", parts)
    ran = active(run.cache)
    expected = reference(model, joined(parts), run.steps, ran)
    keep = ~run.logits.isnan().any(-1)
    assert error(run.logits[keep], expected[keep]) < TOLERANCE
    first = converse(model, f"{ROUTES[route]} + {evict}", parts[:1]).cache
    reached = [layer.reached(0) for layer in first]
    budget = Plan.parse(evict).evict.budget
    kept = sum(sum(map(len, heads)) / len(heads) for heads in held(first))
    assert kept == budget.total(reached, 1.0)


@pytest.mark.parametrize("method", FLOWS)
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_contracts_of_every_method(family, method):
    """Identity; chunked and whole; three tokens at once and one by one; a batch; a second turn."""
    model, _ = tiny_model(family)
    inputs = turn(family, 2)
    plain = converse(model, f"{method}:1.0", [inputs])
    assert plain.cache.flows == []
    assert error(plain.logits, plain_logits(model, inputs)[0]) < TOLERANCE
    plan = f"{method}:0.7" + ("(windows=[1])" if method == "lightkv" else "")
    more = turn(family, 1, " And this?", seed=1, first=False)
    whole = converse(model, plan, [inputs, tokens(70, 71, 72), more])
    parts = [inputs, tokens(70), tokens(71), tokens(72), more]
    again = converse(model, plan, parts, chunk=9)
    keep = ~whole.logits.isnan().any(-1)
    assert error(whole.logits[keep], again.logits[keep]) < TOLERANCE
    assert same_held(held(whole.cache), held(again.cache))
    batch, singles = batch_and_singles(family, (1, 2))
    with as_it_was(model), compress(model, plan) as run:
        last = model(**batch).logits[:, -1]
    for row, single in enumerate(singles):
        alone = converse(model, plan, [single])
        assert same_held(held(run.cache, row), held(alone.cache))
        assert error(last[row], alone.logits[-1]) < TOLERANCE
    visual = run.cache.progress.layouts[1].visual
    fewer = [int((rows & visual).sum()) < int(visual.sum()) for rows in active(run.cache, 1)]
    assert any(fewer) or any("too small" in note for note in run.report.notes)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_identity_takes_the_plain_path(family):
    model, _ = tiny_model(family)
    inputs = turn(family, 2)
    expected = plain_logits(model, inputs)
    for plan in ("reroute:1.0", "fastv:1.0", "delete(shares=[1.0,1.0,1.0])", "pdrop(flops=1.0)"):
        run = converse(model, plan, [inputs])
        assert run.cache.flows == []
        assert error(run.logits, expected[0]) < TOLERANCE
    run = converse(model, "reroute:100000", [inputs])
    assert error(run.logits, expected[0]) < TOLERANCE
    assert any("all of them ran" in note for note in run.notes)


def test_a_prompt_without_images_runs_whole():
    model, _ = tiny_model("llava")
    inputs = turn("llava", 0)
    run = converse(model, "reroute:0.5", [inputs, tokens(70)])
    assert error(run.logits[:-1], plain_logits(model, inputs)[0]) < TOLERANCE
    assert all(layer.reached(0) == run.cache.get_seq_length() for layer in run.cache)


@pytest.mark.parametrize("plan", ["pdrop:0.6", "reroute:0.6", "reroute:0.6 + tgv-kv:0.5"])
@pytest.mark.parametrize("family", ["llava", "qwen3-vl", "smolvlm"])
def test_beams_say_what_they_score(family, plan):
    """The probability of a beam's answer is that of the same tokens fed one by one."""
    model, _ = tiny_model(family)
    inputs = turn(family, 1)
    with as_it_was(model), compress(model, plan):
        out = model.generate(
            **inputs, max_new_tokens=4, num_beams=3, do_sample=False, length_penalty=0.0,
            return_dict_in_generate=True, output_scores=True, early_stopping=True,
            eos_token_id=511,
        )  # fmt: skip
    answer = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    run = converse(model, plan, [inputs, *(tokens(token) for token in answer)])
    start = inputs["input_ids"].shape[1] - 1
    logs = run.logits[start : start + len(answer)].log_softmax(-1)
    total = sum(float(logs[place, token]) for place, token in enumerate(answer))
    assert abs(total - float(out.sequences_scores[0])) < 1e-4


def test_all_hidden_states_are_those_of_the_rows():
    model, _ = tiny_model("qwen3-vl")
    inputs = turn("qwen3-vl", 2)
    with as_it_was(model), compress(model, "pdrop:0.6") as run:
        states = model(**inputs, output_hidden_states=True).hidden_states
    with as_it_was(model), compress(model, "reroute:0.6"):
        waited = model(**inputs, output_hidden_states=True).hidden_states
    ran = active(run.cache)
    assert len(states) == len(ran) + 1
    for state, rows in zip(states[1:], ran, strict=True):
        assert torch.equal(~state[0].isnan().any(-1), rows)
    assert not any(bool(state.isnan().any()) for state in waited)


def test_what_cannot_be_carried_out_is_refused_before_anything_runs():
    model, _ = tiny_model("llava")
    inputs = turn("llava", 1)
    with compress(model, "reroute:0.5"), pytest.raises(PlanError, match="no loss over all"):
        model(**inputs, labels=inputs["input_ids"])
    model.train()
    try:
        with compress(model, "fastv:0.7"), pytest.raises(PlanError, match="call model"):
            model(**inputs)
    finally:
        model.eval()
    for plan, words in {
        "fastv:0.3": "The smallest is",
        "fastv:3": "The smallest is",
        "reroute(flops=0.1)": "cannot be met",
        "reroute:0.5(layers=[2,7])": "not ascending layers",
        "reroute(shares=[0.5,0.2])": "give 3 shares",
    }.items():
        with pytest.raises(PlanError, match=words):
            converse(model, plan, [inputs])
    for text, words in {
        "reroute": "needs a budget",
        "reroute:64MB": "counts visual tokens",
        "delete(shares=[0.2,0.5,0.6])": "cannot grow",
        "reroute:0.5(flops=0.5)": "take one",
        "reroute:0.5(scores_from=previous)": "needs delete",
        "reroute(shares=[0.2,1.5,0.1])": "not all in",
        "fastv:0.5 + reroute:0.5": "both act in the stage route",
    }.items():
        with pytest.raises(PlanError, match=words):
            Plan.parse(text)
    sliding, _ = tiny_model("llava-next-sliding")
    with pytest.raises(PlanError, match="causal full attention in every layer"):
        converse(sliding, "reroute:0.5", [turn("llava-next-sliding", 1)])


def test_tokens_are_taken_back_only_after_the_decision():
    model, _ = tiny_model("llava")
    run = converse(model, "reroute:0.5", [turn("llava", 1), tokens(70), tokens(71)])
    run.cache.crop(-1)
    assert run.cache.layers[-1].held(0, 0)[-1] == run.cache.get_seq_length() - 1
    with torch.inference_mode(), compress(model, "reroute:0.5"):
        again = model(**tokens(71), **with_cache(model, run.cache)).logits[0, -1]
    assert error(again, run.logits[-1]) < TOLERANCE
    with pytest.raises(PlanError, match="decided by them"):
        run.cache.crop(-4)


def test_a_failed_turn_leaves_the_cache_as_it_was(monkeypatch):
    model, _ = tiny_model("llava")
    plan = "reroute:0.6"
    parts = [turn("llava", 1), turn("llava", 1, " And this?", seed=3, first=False)]
    expected = converse(model, plan, parts)
    run = converse(model, plan, parts[:1])
    before = held(run.cache)
    run_layer = Stream.run

    def failing(self, number, step):
        if number == 3:
            raise RuntimeError("out of memory")
        run_layer(self, number, step)

    monkeypatch.setattr(Stream, "run", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        converse(model, plan, parts[1:], cache=run.cache)
    monkeypatch.setattr(Stream, "run", run_layer)
    assert same_held(before, held(run.cache))
    again = converse(model, plan, parts[1:], cache=run.cache)
    assert same_held(held(again.cache), held(expected.cache))
    assert error(again.logits, expected.logits[-len(again.logits) :]) < TOLERANCE


def test_a_fork_goes_on_alone_and_keeps_its_route():
    model, _ = tiny_model("llava")
    plan = "reroute:0.6"
    run = converse(model, plan, [turn("llava", 1)])
    fork = run.cache.fork()
    more = turn("llava", 1, " And this?", seed=3, first=False)
    one = converse(model, plan, [more], cache=fork)
    assert run.cache.get_seq_length() < fork.get_seq_length()
    two = converse(model, plan, [more], cache=run.cache)
    assert torch.equal(one.logits, two.logits)
    with pytest.raises(PlanError, match="Start from a new prefill"):
        run.cache.fork(Plan.parse("full"))


@examples(25)
@given(
    images=st.lists(st.sampled_from([(28, 28), (42, 28), (56, 42)]), min_size=1, max_size=3),
    share=st.floats(0.4, 0.95),
    rank=st.sampled_from(["fastv", "pdrop", "nuwa"]),
    action=st.sampled_from(["delete", "reroute"]),
)
def test_any_prompt_meets_its_target(images, share, rank, action):
    model, _ = tiny_model("llava")
    plan = f"{action}:{share:.6f}(rank={rank})"
    inputs = turn("llava", len(images), sizes=images)
    try:
        run = converse(model, plan, [inputs])
    except PlanError as refused:
        assert "The smallest is" in str(refused)
        return
    schedule = run.cache.flows[0].schedules[0]
    visual = int(run.cache.progress.layouts[0].visual.sum())
    ran = [int((rows & run.cache.progress.layouts[0].visual).sum()) for rows in active(run.cache)]
    if schedule is None:
        assert ran == [visual] * 4
        return
    assert ran == schedule.per_layer
    longest = max(b - a for a, b in zip(schedule.layers, [*schedule.layers[1:], 4], strict=True))
    assert abs(sum(ran) - float(f"{share:.6f}") * visual * 4) <= longest / 2 + 1e-6


@pytest.mark.parametrize("hold", ["kivi:4(residual=0)", "windowquant:4"])
@pytest.mark.parametrize(
    "flow", ["reroute:0.6", "pdrop:0.6", "divprune:0.5", "tome:0.6 + fastv:0.7"]
)
def test_hold_after_route(flow, hold):
    """What is packed are the tokens that ran in each layer."""
    model, _ = tiny_model("llava")
    parts = [
        turn("llava", 2),
        tokens(70),
        turn("llava", 1, " So?", seed=2, first=False),
        tokens(71),
    ]
    plain, packed = (converse(model, flow + more, parts) for more in ("", f" + {hold}"))
    first = [converse(model, flow + more, parts[:1]).cache for more in ("", f" + {hold}")]
    assert same_held(*([[h.sort().values for h in layer] for layer in held(c)] for c in first))
    keep = ~packed.logits.isnan().any(-1)
    assert torch.equal(keep, ~plain.logits.isnan().any(-1))
    assert bool(torch.isfinite(packed.logits[keep]).all())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_asking_under_route_and_evict(family):
    """The whole way: chat template, a session of two turns, the report."""
    vlm = VLM(*tiny_model(family))
    chat = vlm.session("reroute(keep=0.5) + tgv-kv:0.2")
    pictures = [picture(56, 56, 1), picture(56, 84, 2)]
    chat.ask("Where is the dog?", pictures, max_new_tokens=3)
    report = chat.ask("And here?", pictures[:1], max_new_tokens=3).report
    (sequence,) = report.sequences
    visual = sum(sequence.images)
    assert abs(sequence.active_visual - 0.5 * visual) < 0.01 * visual + 1
    assert report.work.prefill.total < report.work.full_prefill.total
    text = str(report)
    assert "visual tokens active, mean over layers" in text
    assert "to rank" in text
