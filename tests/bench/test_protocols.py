"""Where items are cut, and that forks of one prefill answer as plans alone do."""

import pytest
import torch

from conduit_kv.bench.protocols import PROTOCOLS, answer, measure, prompt_of
from conduit_kv.engine.runner import State
from conduit_kv.engine.vlm import VLM
from conduit_kv.errors import InputError, PlanError
from conduit_kv.methods import registry
from conduit_kv.methods.evict import EvictMethod
from conduit_kv.plan import Plan
from conduit_kv.tasks import Item, get_task, messages
from tests.tiny import tiny_model

PLANS = [
    Plan.of(text)
    for text in (
        "full",
        "tgv-kv:0.5",
        "h2o:0.3(of=visual)",
        "ada-kv:0.4",
        "text-random:0.6",
        "tova:0.5",
    )
]
TASKS = {
    "short": "board",
    "late": "board-late",
    "follow-up": "board-follow-up",
    "list": "board-list",
}


def item_of(protocol: str, number: int = 1) -> Item:
    return get_task(TASKS[protocol]).items(number + 1)[number]


@pytest.mark.parametrize("name", ["llava", "llava-next", "qwen3-vl", "smolvlm", "internvl3"])
@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_cut(name: str, protocol: str) -> None:
    """Head and rest are the tokens of the whole prompt, cut between question and answer."""
    model = VLM(*tiny_model(name), name)
    item = item_of(protocol)
    prompt = prompt_of(model, item, protocol)
    whole = model.process(model.render(messages(item)), item.images)["input_ids"]
    head = prompt.head["input_ids"]
    rest = head[:, :0] if prompt.rest is None else prompt.rest
    assert torch.equal(torch.cat([head, rest], dim=1), whole)
    assert not model.family.visual_mask(model.model, rest).any()
    said = model.tokenizer.decode(head[0])
    later = model.tokenizer.decode(rest[0])
    if protocol == "late":
        assert said.rstrip().endswith((item.question, "<|im_end|>", "<end_of_utterance>"))
        assert item.question not in later
        assert later.strip()
    elif protocol == "follow-up":
        assert item.first is not None
        assert item.first[0] in said
        assert item.question not in said
        assert item.question in later
        assert item.first[1] in later
    else:
        assert prompt.rest is None


def test_unknown_protocol(vlm: VLM) -> None:
    with pytest.raises(InputError, match="unknown protocol"):
        prompt_of(vlm, item_of("short"), "long")
    with pytest.raises(InputError, match="no first question"):
        prompt_of(vlm, item_of("short"), "follow-up")


def alone(vlm: VLM, item: Item, protocol: str, plan: Plan) -> tuple[str, State]:
    """The plan by itself, token by token, without forks or joined batches."""
    prompt = prompt_of(vlm, item, protocol)
    state = vlm.prefill(prompt.head, plan)
    kept = State(state.cache.fork(), state.logits)
    if prompt.rest is not None:
        state = vlm.extend(state, {"input_ids": prompt.rest}, evict=protocol == "follow-up")
    tokens: list[int] = []
    while len(tokens) < item.max_new_tokens:
        token = int(state.logits.argmax(-1))
        if token in vlm.end_tokens():
            break
        tokens.append(token)
        state = vlm.extend(state, {"input_ids": torch.tensor([[token]])})
    return vlm.tokenizer.decode(tokens, skip_special_tokens=True).strip(), kept


@pytest.mark.parametrize("protocol", ["short", "late", "follow-up"])
def test_forks_answer_as_plans_alone(vlm: VLM, protocol: str) -> None:
    item = item_of(protocol)
    together = answer(vlm, prompt_of(vlm, item, protocol), PLANS)
    for plan, outcome in zip(PLANS, together, strict=True):
        text, kept = alone(vlm, item, protocol, plan)
        report = kept.report
        assert outcome.text == text, plan
        assert outcome.kept == pytest.approx(report.sequences[0].kept)
        assert outcome.kv_bytes == report.kv_bytes
        assert outcome.total == report.sequences[0].tokens


@pytest.mark.parametrize("protocol", ["late", "follow-up"])
def test_results_do_not_depend_on_the_other_plans(vlm: VLM, protocol: str) -> None:
    prompt = prompt_of(vlm, item_of(protocol, 2), protocol)
    together = answer(vlm, prompt, PLANS)
    for plan, outcome in zip(PLANS, together, strict=True):
        assert answer(vlm, prompt, [plan]) == [outcome]
        assert answer(vlm, prompt, [PLANS[-1], plan])[1] == outcome


def test_kept_sets_do_not_depend_on_the_other_plans(vlm: VLM) -> None:
    """Every method: plans that differ in their budget alone share their scores."""
    known = registry().items()
    names = [name for name, m in known if issubclass(m, EvictMethod) and m.takes_budget()]
    plans = [Plan.of(f"{name}:{budget}") for name in names for budget in ("0.3", "0.6")]
    plans += [Plan.of(f"{name}:0.4(of=visual)") for name in names]
    plans += [Plan.of(f"tgv-kv:{budget}(cover=0.5, cover_by=features)") for budget in (0.3, 0.6)]
    prompt = prompt_of(vlm, item_of("late"), "late")
    forks = vlm.forks(vlm.prefill(prompt.head, watch=plans), plans)
    for plan, fork in zip(plans, forks, strict=True):
        cache = vlm.prefill(prompt.head, plan).cache
        for layer in range(len(cache)):
            for head in range(2):
                mine, its = (c.held(layer, 0, head) for c in (cache, fork.cache))
                assert torch.equal(mine, its), (plan, layer, head)
            assert cache.eviction.budgets == fork.cache.eviction.budgets


@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
@pytest.mark.parametrize("evict", [True, False])
def test_extending_together_is_extending_each(name: str, evict: bool) -> None:
    model = VLM(*tiny_model(name), name)
    prompt = prompt_of(model, item_of("follow-up"), "follow-up")
    assert prompt.rest is not None
    joined = model.forks(model.prefill(prompt.head, watch=PLANS), PLANS)
    single = model.forks(model.prefill(prompt.head, watch=PLANS), PLANS)
    model.extend_together(joined, prompt.rest.expand(len(PLANS), -1), evict=evict)
    for plan, one, other in zip(PLANS, single, joined, strict=True):
        one = model.extend(one, {"input_ids": prompt.rest}, evict=evict)
        torch.testing.assert_close(one.logits, other.logits, atol=1e-5, rtol=1e-5)
        assert one.ids == other.ids
        for layer in range(len(one.cache)):
            assert torch.equal(one.cache.held(layer), other.cache.held(layer)), plan


def test_measure(vlm: VLM) -> None:
    short = measure(vlm, prompt_of(vlm, item_of("short"), "short"), PLANS[1], 3)
    assert short.first_token == pytest.approx(short.encode + short.prefill)
    assert short.per_token is not None
    late = measure(vlm, prompt_of(vlm, item_of("late"), "late"), PLANS[1], 1)
    assert late.first_token > late.encode + late.prefill
    assert late.per_token is None


def test_an_answer_says_what_its_prefill_ran(vlm: VLM) -> None:
    prompt = prompt_of(vlm, item_of("short"), "short")
    full, routed = answer(vlm, prompt, [Plan.of("full"), Plan.of("reroute:0.5 + tgv-kv:0.5")])
    assert full.active_visual == full.total_visual
    assert full.prefill_flops == full.full_flops == routed.full_flops
    assert routed.active_visual == pytest.approx(0.5 * full.total_visual, abs=1)
    assert routed.prefill_flops < full.prefill_flops


@pytest.mark.parametrize("text", ["random-select:3", "conduit:0.3", "pdrop:0.6", "nuwa-reduce:0.5"])
def test_every_stage_is_applied(vlm: VLM, text: str) -> None:
    """Whatever the stage, a plan among others does what it does alone."""
    item, plan = item_of("short"), Plan.of(text)
    prompt = prompt_of(vlm, item, "short")
    _, outcome = answer(vlm, prompt, [Plan.of("full"), plan])
    said, kept = alone(vlm, item, "short", plan)
    assert outcome.text == said
    assert outcome.kept_visual == kept.report.sequences[0].kept_visual
    if plan.retrieve is not None:
        assert outcome.kept_visual == 3


def test_a_prefill_is_watched_by_plans_that_begin_like_it(vlm: VLM) -> None:
    head = prompt_of(vlm, item_of("short"), "short").head
    for text in ("random-select:3", "conduit:0.3", "pdrop:0.6", "nuwa-reduce:0.5"):
        with pytest.raises(PlanError, match="cannot be watched"):
            vlm.prefill(head, "full", watch=[Plan.of(text)])
