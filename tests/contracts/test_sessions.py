"""Contract 2 for conversations: a later turn is what the same prompt at once would have been."""

from __future__ import annotations

import pytest
import torch

from conduit_kv import VLM, InputError
from conduit_kv.families import family_of
from tests.contracts.helpers import (
    EVICT,
    TOLERANCE,
    error,
    held,
    joined,
    plain_logits,
    plan_of,
    reference,
    same_held,
    tokens,
)
from tests.contracts.helpers import Step as Rows
from tests.tiny import FAMILY_NAMES, tiny_model
from tests.tiny.parts import picture


class Recorder(VLM):
    """Writes down each turn's text and inputs, and what was held before each step."""

    def __init__(self, name: str) -> None:
        super().__init__(*tiny_model(name))
        self.texts: list[str] = []
        self.parts: list[dict[str, torch.Tensor]] = []
        self.rows: list[Rows] = []

    def process(self, text, images=(), **options):
        self.texts.append(text)
        return super().process(text, images, **options)

    def note(self, inputs, state=None):
        self.parts.append(dict(inputs))
        start = state.cache.get_seq_length() if state else 0
        before = held(state.cache) if state else []
        self.rows.append(Rows(start, start + inputs["input_ids"].shape[1], before))

    def prefill(self, inputs, *arguments, **options):
        self.note(inputs)
        return super().prefill(inputs, *arguments, **options)

    def extend(self, state, inputs, **options):
        self.note(inputs, state)
        return super().extend(state, inputs, **options)

    def extend_together(self, states, ids, **options):
        self.note({"input_ids": ids}, states[0])
        return super().extend_together(states, ids, **options)


QUESTIONS = ("What is in this picture?", "And in this one?", "Which is red?")


def converse(vlm, plan, images, new=3):
    """A session of three questions; ``images`` per question."""
    session = vlm.session(plan)
    replies = [
        session.ask(question, mine, max_new_tokens=new)
        for question, mine in zip(QUESTIONS, images, strict=True)
    ]
    return session, replies


ONE, OTHER = picture(28, 42, 1), picture(42, 28, 2)
CONVERSATIONS = {
    "an image each": ([ONE], [OTHER], []),
    "two, then one": ([ONE, OTHER], [], [picture(28, 28, 3)]),
    "the same image twice": ([ONE, ONE], [], [ONE]),
    "no image at first": ([], [ONE], []),
    "no image at all": ([], [], []),
}


@pytest.mark.parametrize("images", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_later_turns_equal_the_same_prompt_at_once(name, images):
    vlm = Recorder(name)
    session, replies = converse(vlm, "full", images)
    whole = joined(vlm.parts)
    cache, count = session.state.cache, whole["input_ids"].shape[1]
    assert whole["input_ids"][0].tolist() == session.state.ids and count == len(session.state.ids)
    expected = plain_logits(vlm.model, whole)[0]
    assert error(session.state.logits[0], expected[-1]) < TOLERANCE
    for reply, turn in zip(replies, (0, 1, 2), strict=True):
        firsts = [n for n, text in enumerate(vlm.parts) if text["input_ids"].shape[1] > 1]
        at = vlm.rows[firsts[turn]].stop - 1
        greedy = expected[at : at + len(reply.tokens)].argmax(-1)
        assert greedy.tolist() == list(reply.tokens)
        said = session.state.ids[at + 1 : at + 1 + len(reply.tokens)]
        assert said == list(reply.tokens)[: len(said)]  # the newest token has not run yet
        assert turn == 2 or len(said) == len(reply.tokens)
    family = family_of(vlm.model)
    layout = family.layouts(vlm.model, [whole["input_ids"][0]], whole)[0]
    ours = cache.progress.layouts[0]
    assert ours.grids == layout.grids
    for part in ("image", "frame", "row", "column"):
        assert torch.equal(getattr(ours, part), getattr(layout, part))
    assert list(replies[-1].report.sequences[0].images) == layout.counts()
    assert len(layout.grids) == sum(len(mine) for mine in images)
    relative = family.relative_positions(vlm.model, [whole["input_ids"][0]], whole)[0]
    positions = cache.progress.position_ids(0)
    assert torch.equal(positions, relative.reshape(-1, count).expand_as(positions))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_text_of_the_turns_is_the_text_of_the_whole(name):
    """But for white space: some templates write a blank before an answer that they render."""
    vlm = Recorder(name)
    session, replies = converse(vlm, "full", CONVERSATIONS["an image each"])
    text = vlm.texts[0]
    for reply, following in zip(replies, vlm.texts[1:], strict=False):
        text += reply.text + following
    whole = vlm.render(session.messages[:-1])
    assert "".join(text.split()) == "".join(whole.split())


@pytest.mark.parametrize("method", EVICT)
def test_sessions_under_a_plan_equal_a_masked_forward(method):
    name = FAMILY_NAMES[(EVICT.index(method) * 2) % len(FAMILY_NAMES)]
    vlm = Recorder(name)
    session, _ = converse(vlm, plan_of(method, 0.5, merge=False), CONVERSATIONS["an image each"])
    expected = reference(vlm.model, joined(vlm.parts), vlm.rows)
    assert error(session.state.logits[0], expected[-1]) < TOLERANCE


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_chunked_session_is_the_whole_one(name):
    vlm = VLM(*tiny_model(name))
    sessions = [vlm.session("tgv-kv:0.4", prefill_chunk=chunk) for chunk in (None, 9)]
    answers = []
    for session in sessions:
        answers.append(session.ask("What?", [ONE], max_new_tokens=3).tokens)
        answers[-1] += session.ask("And?", [OTHER], max_new_tokens=3).tokens
    assert answers[0] == answers[1]
    assert same_held(*(held(session.state.cache) for session in sessions))
    assert error(sessions[1].state.logits, sessions[0].state.logits) < TOLERANCE


def test_ask_is_the_first_turn_of_a_session():
    vlm = VLM(*tiny_model("llava"))
    one = vlm.ask("What?", [ONE], "tgv-kv:0.4", max_new_tokens=4)
    other = vlm.session("tgv-kv:0.4").ask("What?", [ONE], max_new_tokens=4)
    assert one.tokens == other.tokens and one.report.sequences == other.report.sequences


def test_a_session_says_what_it_cannot_do():
    vlm = VLM(*tiny_model("llava"))
    session = vlm.session()
    with pytest.raises(InputError, match="nothing has been asked"):
        _ = session.report
    with pytest.raises(InputError, match="empty"):
        session.ask(" ")
    with pytest.raises(InputError, match="at least one"):
        session.ask("What?", max_new_tokens=0)
    with pytest.raises(InputError, match="too long"):
        session.ask("long " * 2000)
    with pytest.raises(InputError, match="no-such-file"):
        session.ask("What?", ["no-such-file.png"])
    assert session.messages == [] and session.state is None
    reply = session.ask("What?", [ONE], max_new_tokens=2)
    assert len(reply.tokens) == 2


@pytest.mark.parametrize("plan", ["full", "tova:0.4"])
def test_a_stop_string_ends_an_answer_and_the_next_turn_follows(plan):
    """The token that completed the stop string is seen, as it was said."""
    vlm = Recorder("qwen2-vl")
    free = vlm.session(plan).ask("What?", [ONE], max_new_tokens=8)
    whole = "".join(free.text)
    word = whole[len(whole) // 2 :][:2]
    vlm = Recorder("qwen2-vl")
    session = vlm.session(plan)
    cut = session.ask("What?", [ONE], max_new_tokens=8, stop=[word])
    assert cut.finish == "stop" and cut.text == whole[: whole.find(word)]
    assert free.tokens[: len(cut.tokens)] == cut.tokens
    session.ask("And?", max_new_tokens=1)
    expected = reference(vlm.model, joined(vlm.parts), vlm.rows)
    assert error(session.state.logits[0], expected[-1]) < TOLERANCE
    asked = vlm.parts[0]["input_ids"].shape[1]
    assert session.state.ids[asked : asked + len(cut.tokens)] == list(cut.tokens)


def test_an_end_of_turn_token_stops_and_is_not_in_the_cache(monkeypatch):
    vlm = Recorder("llava")
    free = vlm.session().ask("What?", [ONE], max_new_tokens=4)
    end = free.tokens[2]
    monkeypatch.setattr(vlm, "end_tokens", lambda: frozenset([end]))
    session = vlm.session()
    reply = session.ask("What?", [ONE], max_new_tokens=4)
    first = free.tokens.index(end)
    assert reply.finish == "stop" and reply.tokens == free.tokens[:first]
    assert session.state.ids[-first:] == list(reply.tokens) or first == 0


def test_tokens_of_a_turn_are_text_tokens():
    """``tokens`` of the helpers is what a session runs while it decodes."""
    assert tokens(1, 2)["input_ids"].tolist() == [[1, 2]]
