"""How an item is asked, and where in it eviction acts.

A short answer is decided by the prefill, which sees the whole cache, so that it says nothing about
what was evicted. The other protocols put the decision behind the eviction.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from conduit_kv.errors import InputError
from conduit_kv.tasks import Item, messages

if TYPE_CHECKING:
    from conduit_kv.engine.report import Report
    from conduit_kv.engine.runner import State
    from conduit_kv.engine.vlm import VLM
    from conduit_kv.plan import Plan

__all__ = [
    "PROTOCOLS",
    "Outcome",
    "Prompt",
    "Seconds",
    "answer",
    "forks_of",
    "measure",
    "prompt_of",
]

PROTOCOLS = {
    "short": (
        "the prompt ends with the assistant's turn; evict; answer. The first token of the answer "
        "is decided by the prefill, which saw everything"
    ),
    "late": (
        "the prompt without the assistant's turn; evict; run the tokens that open the assistant's "
        "turn on what was kept, without evicting again; answer"
    ),
    "follow-up": (
        "question 1 up to the assistant's turn; evict; run its right answer and question 2 on "
        "what was kept; then the budget is solved anew over all tokens, as in a session; answer. "
        "The first token of the answer is decided by what was kept after question 1"
    ),
    "list": "as short, with a long answer",
}
"""What each protocol does, for the manifest."""


@dataclass(frozen=True)
class Prompt:
    """An item as token ids, cut where eviction acts.

    Attributes
    ----------
    head : mapping
        The model's inputs up to the cut: prefilled, then evicted.
    rest : Tensor or None
        ``[1, n]`` int64, text tokens run on what was kept; None if there are none.
    evict_rest : bool
        Whether the budget is solved anew after ``rest``.
    max_new_tokens : int
    """

    head: Mapping[str, Any]
    rest: Tensor | None
    evict_rest: bool
    max_new_tokens: int


@dataclass(frozen=True)
class Outcome:
    """What a plan answered to an item, and what it was answered from.

    Attributes
    ----------
    text : str
    kept, total : float, int
        Tokens held after the eviction on which the answer rests, mean over layers, of those seen.
    kept_visual, total_visual : float, int
        The visual ones among them.
    kv_bytes : int
        Bytes of K and V held then.
    full_bytes : int
        Bytes of K and V if all of it were held.
    active_visual : float
        Visual tokens that ran in the prefill, mean over layers.
    prefill_flops, full_flops : float
        FLOPs of that prefill, ranking included, and without a plan; 0 in older records.
    """

    text: str
    kept: float
    total: int
    kept_visual: float
    total_visual: int
    kv_bytes: int
    full_bytes: int
    active_visual: float = 0.0
    prefill_flops: float = 0.0
    full_flops: float = 0.0


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds of one plan that runs alone at batch 1.

    Attributes
    ----------
    encode : float
        Image encoder and embedding.
    prefill : float
        The text stack over the prompt that is prefilled, scoring and eviction included.
    first_token : float
        From the processed inputs of the last question to the first token of its answer.
    per_token : float or None
        Mean over the tokens after the first one; None if there is only one.
    """

    encode: float
    prefill: float
    first_token: float
    per_token: float | None


def prompt_of(
    vlm: VLM, item: Item, protocol: str, images: Sequence[Image.Image] | None = None
) -> Prompt:
    """Render, tokenize and cut an item.

    Parameters
    ----------
    vlm : VLM
    item : Item
    protocol : str
        A key of :data:`PROTOCOLS`.
    images : sequence of PIL image, optional
        Shown in place of the item's own.

    Raises
    ------
    InputError
        If the protocol is unknown, or the chat template cannot be cut where it must be.
    """
    if protocol not in PROTOCOLS:
        raise InputError(f"unknown protocol {protocol!r}: known are {', '.join(PROTOCOLS)}")
    chat = messages(item)
    text = vlm.render(chat)
    inputs = vlm.process(text, list(item.images if images is None else images))
    vlm.check_length(inputs["input_ids"].shape[1], item.max_new_tokens)
    if protocol == "late":
        first = vlm.render(chat, answer_next=False)
        head, rest = _cut(vlm, inputs, text, first, item.question)
        return Prompt(head, rest, False, item.max_new_tokens)
    if protocol == "follow-up":
        if item.first is None:
            raise InputError(f"item {item.id} has no first question: take a -follow-up task")
        first = vlm.render(messages(item, turn=1))
        head, rest = _cut(vlm, inputs, text, first, item.first[0])
        return Prompt(head, rest, True, item.max_new_tokens)
    return Prompt(inputs, None, False, item.max_new_tokens)


def _cut(
    vlm: VLM, inputs: Mapping[str, Any], text: str, first: str, question: str
) -> tuple[dict[str, Any], Tensor]:
    """Cut ``inputs`` of ``text`` where ``first``, its beginning, ends.

    ``text`` is tokenized once, so that the tokens are those of the whole prompt however it is cut.
    From ``question`` on both are text; the cut is where their tokens part.
    """
    start = first.rindex(question)
    if text[:start] != first[:start]:
        raise InputError(f"the chat template of {vlm.name} changes earlier turns in later ones")

    def tail(whole: str) -> list[int]:
        ids: list[int] = vlm.tokenizer(whole[start:], add_special_tokens=False)["input_ids"]
        return ids

    long, short = tail(text), tail(first)
    same = 0
    while same < len(short) and same < len(long) and long[same] == short[same]:
        same += 1
    ids: Tensor = inputs["input_ids"]
    rest = ids.new_tensor([long[same:]])
    size = rest.shape[1]
    if not size or not torch.equal(ids[:, -size:], rest):
        raise InputError(
            f"the chat template of {vlm.name} does not let a prompt be cut after its question: "
            "take a task with the protocol short or list"
        )
    head = {
        name: value[:, :-size] if isinstance(value, Tensor) and value.shape == ids.shape else value
        for name, value in inputs.items()
    }
    return head, rest


def answer(vlm: VLM, prompt: Prompt, plans: Sequence[Plan]) -> list[Outcome]:
    """What each of several plans answers to one prompt, which is prefilled once.

    Every evict method scores the same prefill; each plan then goes on with its own fork of the
    cache, all of them as one batch. What a plan keeps does not depend on the others; what it
    answers does not either, up to the rounding of a matrix product of another height.
    """
    forks = forks_of(vlm, prompt, plans)
    reports = [fork.report for fork in forks]
    if prompt.rest is not None:
        rest = prompt.rest.expand(len(forks), -1)
        vlm.extend_together(forks, rest, evict=prompt.evict_rest)
    answers = vlm.decode_together(forks, prompt.max_new_tokens)
    return [_outcome(vlm, tokens, report) for tokens, report in zip(answers, reports, strict=True)]


def forks_of(vlm: VLM, prompt: Prompt, plans: Sequence[Plan]) -> list[State]:
    """One prefill per distinct beginning of a plan, forked for the evict and hold stages."""
    shared: dict[Plan, list[int]] = {}
    for number, plan in enumerate(plans):
        shared.setdefault(plan.beginning, []).append(number)
    forks: dict[int, State] = {}
    for beginning, numbers in shared.items():
        mine = [plans[number] for number in numbers]
        state = vlm.prefill(prompt.head, beginning, watch=mine)
        forks.update(zip(numbers, vlm.forks(state, mine), strict=True))
    return [forks[number] for number in range(len(plans))]


def _outcome(vlm: VLM, tokens: Sequence[int], report: Report) -> Outcome:
    (sequence,) = report.sequences
    return Outcome(
        text=str(vlm.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip(),
        kept=sequence.kept,
        total=sequence.tokens,
        kept_visual=sequence.kept_visual,
        total_visual=sum(sequence.images),
        kv_bytes=report.kv_bytes,
        full_bytes=report.full_bytes,
        active_visual=sequence.active_visual,
        prefill_flops=report.work.prefill.total if report.work else 0.0,
        full_flops=report.work.full_prefill.total if report.work else 0.0,
    )


def measure(vlm: VLM, prompt: Prompt, plan: Plan, max_new_tokens: int = 16) -> Seconds:
    """Time one plan alone, at batch 1, nothing shared.

    The answer is made as long as ``max_new_tokens`` whatever the model says, so that plans are
    timed over the same number of tokens.
    """
    state = vlm.prefill(prompt.head, plan)
    encode = state.seconds["encode"]
    prefill = state.seconds["first_token"]
    first = prefill
    if prompt.rest is not None:
        start = _now(vlm)
        vlm.extend_together([state], prompt.rest, evict=prompt.evict_rest)
        more = _now(vlm) - start
        # A later turn's first token waits for that turn alone; a late one for all of its prompt.
        first = more if prompt.evict_rest else prefill + more
    steps = min(prompt.max_new_tokens, max_new_tokens) - 1
    start = _now(vlm)
    for _ in range(steps):
        vlm.step([state], [_choose(state)])
    spent = _now(vlm) - start
    return Seconds(encode, prefill - encode, first, spent / steps if steps else None)


def _choose(state: State) -> int:
    return int(state.logits.argmax(-1))


def _now(vlm: VLM) -> float:
    if vlm.model.device.type == "cuda":
        torch.cuda.synchronize(vlm.model.device)
    return time.perf_counter()
