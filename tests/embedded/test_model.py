"""The built model is a standard one, and what training saw is what the processor gives."""

import random

import pytest
import torch
from benchmarks.embedded import answer, wrong_images

from conduit_kv.embedded import ensure_built, load_embedded
from conduit_kv.tasks import get_task, messages

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def embedded():
    return load_embedded(progress=False)


def prompt(processor, item, **options):
    text = processor.apply_chat_template(messages(item), add_generation_prompt=True)
    return processor(images=list(item.images), text=text, return_tensors="pt", **options)


def test_loads_as_any_other_model(embedded) -> None:
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    folder = ensure_built(progress=False)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(model).__name__ == "LlavaForConditionalGeneration"
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.padding_side == "left"
    assert tokenizer.convert_tokens_to_ids("<image>") == model.config.image_token_id
    mine = dict(embedded[0].named_parameters())
    assert all(torch.equal(mine[name], p) for name, p in model.named_parameters())


def test_template(embedded) -> None:
    _, processor = embedded
    (item,) = get_task("haystack-2-follow-up").items(1)
    text = processor.apply_chat_template(messages(item), add_generation_prompt=True)
    assert text == (
        f"<|im_start|>user\nImage 1:<image>\nImage 2:<image>\n{item.first[0]}<|im_end|>\n"
        f"<|im_start|>assistant\n{item.first[1]}<|im_end|>\n"
        f"<|im_start|>user\n{item.question}<|im_end|>\n<|im_start|>assistant\n"
    )
    late = processor.apply_chat_template(messages(item), add_generation_prompt=False)
    assert text == late + "<|im_start|>assistant\n"
    plain = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    assert processor.apply_chat_template(plain) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    )


def test_196_tokens_per_image(embedded) -> None:
    model, processor = embedded
    (item,) = get_task("haystack-3").items(1)
    inputs = prompt(processor, item)
    assert inputs["pixel_values"].shape == (3, 3, 224, 224)
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == 3 * 196


def test_training_encodes_as_the_processor_does(embedded) -> None:
    from conduit_kv.embedded.curriculum import Sample, Turn
    from conduit_kv.embedded.train import Encoder, pixels

    _, processor = embedded
    encoder = Encoder(processor.tokenizer)
    for name in ("board", "haystack-2-follow-up", "easy-vqa"):
        (item,) = get_task(name).items(1)
        turns = [Turn(*pair) for pair in (item.first, (item.question, item.answer)) if pair]
        first = 1 if len(item.images) > 1 else None
        ids = encoder(Sample(item.images, tuple(turns), first)).ids
        inputs = prompt(processor, item)
        expected = inputs["input_ids"][0].tolist()
        assert ids[: len(expected)] == expected
        torch.testing.assert_close(pixels(item.images).float(), inputs["pixel_values"].float())


def test_training_decoder_equals_transformers(embedded) -> None:
    from conduit_kv.embedded.train import PackedLlama

    model, _ = embedded
    text_model = model.model.language_model
    state = {f"model.{name}": p.detach() for name, p in text_model.state_dict().items()}
    packed = PackedLlama(state, text_model.config, torch.Generator().manual_seed(0))
    ids = torch.randint(0, 49152, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = text_model(input_ids=ids[:1]).last_hidden_state[0].float()
        ours = packed(packed.embedding[ids.flatten()], [40, 40]).float()
    # bf16, 30 layers: close, and closer than to anything else.
    assert torch.nn.functional.cosine_similarity(plain, ours[:40], dim=-1).min() > 0.99
    assert torch.nn.functional.cosine_similarity(plain, ours[40:], dim=-1).mean() < 0.9


def test_answers_do_not_depend_on_the_batch(embedded) -> None:
    model, processor = embedded
    items = get_task("board").items(6)
    together = answer(model, processor, items)
    alone = [answer(model, processor, [item])[0] for item in items]
    assert sum(a == b for a, b in zip(together, alone, strict=True)) >= 5


def test_it_sees(embedded) -> None:
    """A handful of questions: far above guessing, and the image is what it answers from."""
    model, processor = embedded
    task = get_task("board")
    items = task.items(24, seed=7)
    right = answer(model, processor, items)
    wrong = answer(model, processor, wrong_images(items))
    score = [sum(map(task.score, texts, items)) / len(items) for texts in (right, wrong)]
    assert score[0] > 0.5
    assert score[1] < 0.4


def test_wrong_images_are_other_images() -> None:
    items = get_task("board").items(40)
    for item, other in zip(items, wrong_images(items), strict=True):
        assert item.sources != other.sources
        assert (item.question, item.answer) == (other.question, other.answer)


def test_curriculum_never_shows_what_is_held_out() -> None:
    from conduit_kv.embedded.curriculum import draw_sample
    from conduit_kv.tasks.scenes import held_out

    rng = random.Random(0)
    for number in range(120):
        for board in draw_sample(rng, number / 120).boards:
            assert not any(held_out(p.colour, p.kind, p.row, p.column) for p in board.pictures)
