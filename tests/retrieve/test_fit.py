"""Training ReToken's token: what is learned is what is asked with, and it can be gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from conduit_kv import InputError, PlanError
from conduit_kv.artefact import load_artefact, weights_digest
from conduit_kv.cli import main
from conduit_kv.engine.runner import Runner
from conduit_kv.retrieve.fit import Data, Example, Settings, Trainer, board_data, folder_data
from tests.contracts.helpers import SIZES
from tests.tiny import tiny_model
from tests.tiny.parts import picture

QUESTIONS = ("Where is the dog?", "What is red here, and what is blue?", "Which one?")


def data() -> Data:
    images = [picture(*SIZES[0], seed) for seed in range(6)]
    examples = [
        Example(QUESTIONS[n % 3], tuple((n + k) % 6 for k in range(4)), (n % 4,)) for n in range(12)
    ]
    return Data("pictures", images, tuple(examples))


def runner(name: str = "llava") -> Runner:
    return Runner(*tiny_model(name), name)


def settings(**changes: Any) -> Settings:
    return Settings(**{"steps": 6, "batch": 4, "depths": (0.5,), **changes})


@pytest.mark.parametrize(
    ("name", "space", "depths"),
    [
        ("llava", "value", (0.5,)),
        ("qwen3-vl", "value", (0.25, 0.75)),
        ("qwen2.5-vl", "key", (0.5,)),
    ],
)
def test_what_is_trained_is_what_is_asked_with(
    name: str, space: str, depths: tuple[float, ...], tmp_path: Path
) -> None:
    vlm, known = runner(name), data()
    trainer = Trainer(vlm, known, settings(space=space, depths=depths), tmp_path / "t.safetensors")
    artefact = trainer.run()
    token = trainer._new_token()
    with torch.no_grad():
        token.start.copy_(artefact.tensors["embedding"])
        token.temperature.copy_(artefact.tensors["temperature"])
        asked = trainer._ask(token, known.examples[:1])[:, 0]
        expected = trainer.image_scores(token, asked, known.examples[0].images)
    # The same question of the same images, through a plan.
    message = {
        "role": "user",
        "content": [{"type": "image"}] * 4 + [{"type": "text", "text": QUESTIONS[0]}],
    }
    images = [known.images[number] for number in known.examples[0].images]
    inputs = vlm.process(vlm.render([message]), images)
    plan = f"retoken:5(artefact={tmp_path / 't.safetensors'})"
    state = vlm.prefill(inputs, plan)
    retrieval = state.cache.retrieval
    assert retrieval.choice.order == tuple(
        expected.sort(descending=True, stable=True).indices.tolist()
    )
    found = retrieval.choice.ranking.unit
    # Training reads the images in bf16.
    assert torch.allclose(found, expected, atol=0.05 * float(expected.abs().max()))
    assert torch.equal(vlm.prefill(inputs, plan).logits, state.logits)


def test_the_token_learns(tmp_path: Path) -> None:
    vlm = runner()
    # Each question always has the same image as its answer.
    examples = tuple(Example(QUESTIONS[n % 3], (0, 1, 2, 3), (n % 3,)) for n in range(6))
    known = Data("pictures", data().images, examples)
    trainer = Trainer(vlm, known, settings(steps=60, batch=6), tmp_path / "t.safetensors")
    artefact = trainer.run()
    assert trainer.losses[-1] < 0.7 * trainer.losses[0]
    assert trainer.recall(artefact, examples) >= 2 / 3
    assert artefact.config["scored_layers"] == [2] and artefact.layers == 4


def test_the_model_is_as_it_was(tmp_path: Path) -> None:
    vlm = runner()
    before = weights_digest(vlm.family.text_model(vlm.model))
    Trainer(vlm, data(), settings(), tmp_path / "t.safetensors").run()
    assert weights_digest(vlm.family.text_model(vlm.model)) == before
    assert "forward" not in vars(vlm.model)


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    vlm, known = runner(), data()
    whole = Trainer(vlm, known, settings(steps=30), tmp_path / "whole.safetensors").run()

    def stop(what: str, done: int, of: int, loss: float | None) -> None:
        if what == "training" and done == 27:
            raise KeyboardInterrupt

    trainer = Trainer(vlm, known, settings(steps=30), tmp_path / "parts.safetensors")
    with pytest.raises(KeyboardInterrupt):
        trainer.run(stop)
    assert trainer.state_file.is_file() and not trainer.out.exists()
    other = Trainer(vlm, known, settings(steps=30, seed=1), tmp_path / "parts.safetensors")
    with pytest.raises(InputError, match="other settings"):
        other.run()
    resumed = Trainer(vlm, known, settings(steps=30), tmp_path / "parts.safetensors")
    parts = resumed.run()
    assert not trainer.state_file.exists()
    for name, tensor in whole.tensors.items():
        assert torch.allclose(parts.tensors[name], tensor, atol=1e-5)


def test_an_artefact_is_for_one_model_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    written = Trainer(runner(), data(), settings(), path).run()
    read = load_artefact(path)
    assert read.kind == "retoken" and read.config == json.loads(json.dumps(written.config))
    other = runner("qwen2-vl")
    inputs = other.process(
        other.render([{"role": "user", "content": [{"type": "image"}]}]), [data().images[0]]
    )
    with pytest.raises(PlanError, match="another model"):
        other.prefill(inputs, f"retoken:4(artefact={path})")
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    with pytest.raises(InputError, match="damaged"):
        load_artefact(tmp_path / "damaged.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="damaged or no artefact"):
        load_artefact(tmp_path / "cut.safetensors")
    with pytest.raises(InputError, match="no artefact can be read"):
        load_artefact(tmp_path / "none.safetensors")


def test_weights_are_the_same_in_fp32_and_bf16() -> None:
    import copy

    text = runner().family.text_model(runner().model)
    low = copy.deepcopy(text).bfloat16()
    assert weights_digest(text) == weights_digest(low)
    with torch.no_grad():
        low.layers[0].mlp.up_proj.weight[0, 0] += 0.5
    assert weights_digest(text) != weights_digest(low)


def test_boards_are_training_boards_in_small_sets() -> None:
    known = board_data(12, images=4, boards=40, seed=3)
    assert len(known.examples) == 12 and all(len(e.images) == 4 for e in known.examples)
    assert known.examples == board_data(12, images=4, boards=40, seed=3).examples
    with pytest.raises(InputError, match="half of the boards"):
        board_data(12, images=30, boards=40)
    assert {len(e.gold) for e in known.examples} == {1, 2}
    assert not any("image 1" in e.question for e in known.examples)


def test_data_from_a_folder(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        picture(28, 28, 1).save(tmp_path / name)
    lines = [{"question": "Which?", "images": ["a.png", "b.png"], "gold": [1]}]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    known = folder_data(tmp_path)
    assert known.examples == (Example("Which?", (0, 1), (1,)),) and len(known.images) == 2
    for change, words in (
        ({"gold": [2]}, "line 1"),
        ({"images": ["a.png"]}, "two images"),
        ({"images": ["a.png", "c.png"]}, "c.png is missing"),
        ({"gold": [0, 1]}, "every image is gold"),
        ({"gold": None}, "line 1"),
    ):
        file.write_text(json.dumps({**lines[0], **change}))
        with pytest.raises(InputError, match=words):
            folder_data(tmp_path)


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "t.safetensors")
    assert main(["fit", "retoken", "--out", str(tmp_path / "t.bin")]) == 2
    assert main(["fit", "retoken", "--out", out, "--space", "x"]) == 2
    assert main(["fit", "retoken", "--out", out, "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "safetensors" in said and "value or key" in said and "questions.jsonl" in said
