"""Train ReToken: one embedding, and a temperature per scored layer and query head, for one model.

The model is frozen, and only its first layers are run: over each image by itself, once, to read
what it stores in the scored layers; and over each question with the embedding behind it. Every step
draws a few questions, each with a small set of images of which one (or a few) holds the answer:

.. math:: -\\log \\frac{e^{s_+}}{\\sum_u e^{s_u}}

with the image scores of :class:`conduit_kv.methods.retrieve.ReToken`.

Memory: the model; ``images x scored layers x KV heads x tokens x d`` numbers of two bytes for the
images; and ``2 x questions x layers run x KV heads x tokens x d`` numbers for the questions, whose
K and V do not depend on the token behind them. On one GPU, for a model of 8B parameters in bf16
(16 GB) with 36 layers, 8 KV heads of 128, one scored layer, 2,000 images of 256 tokens and 2,000
questions of 64 tokens: 16 + 1.0 + 4.7 GB.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from conduit_kv.artefact import Artefact, weights_digest
from conduit_kv.compat import cache_name, text_output
from conduit_kv.engine.compress import Run, lock_of, wrapped
from conduit_kv.engine.request import RequestCache
from conduit_kv.errors import InputError
from conduit_kv.images import ImageLike
from conduit_kv.methods.retrieve.artefact import KIND
from conduit_kv.methods.retrieve.base import unit_softmax_means
from conduit_kv.methods.retrieve.retoken import Text, cosines, read
from conduit_kv.plan import Plan
from conduit_kv.retrieve.question import early_states
from conduit_kv.tasks.scenes import Board

if TYPE_CHECKING:
    from conduit_kv.engine.runner import Runner

Progress = Callable[[str, int, int, float | None], None]
"""What is being done, how much of it is done, of how much, and the newest loss."""

_START_TEMPERATURE = math.log(20.0)
_EVERY = 25
"""Steps between two writings of the state from which training goes on."""


@dataclass(frozen=True)
class Example:
    """A question about a small set of images.

    Attributes
    ----------
    question : str
    images : tuple of int
        Numbers of the images shown, in the data's list.
    gold : tuple of int
        Places in ``images`` that hold the answer, from 0.
    """

    question: str
    images: tuple[int, ...]
    gold: tuple[int, ...]


@dataclass(frozen=True)
class Data:
    """Questions, and the images that they are about.

    Attributes
    ----------
    name : str
        As recorded in the artefact.
    images : sequence of path or PIL image
    examples : tuple of Example
    """

    name: str
    images: Sequence[ImageLike]
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Settings:
    """How the token is trained.

    Parameters
    ----------
    steps, batch : int
        Questions per step are ``batch``.
    depths : tuple of float
        Scored layers as shares of the depth; the deepest decides how many layers run.
    space : {"value", "key"}
        Score against stored values, or against keys without RoPE.
    learning_rate : float
        In units of the deviation of the model's word embeddings.
    seed : int
    """

    steps: int = 400
    batch: int = 16
    depths: tuple[float, ...] = (0.11, 0.14, 0.17)
    space: Literal["value", "key"] = "value"
    learning_rate: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise InputError("steps and batch are at least 1")
        if not self.depths or not all(0 <= depth < 1 for depth in self.depths):
            raise InputError(f"depths are shares in [0, 1), not {self.depths}")


# -- data ------------------------------------------------------------------------------------------


def board_data(questions: int, images: int = 16, boards: int = 200, seed: int = 0) -> Data:
    """Questions about small sets of training boards: no test board, no held-out combination.

    Parameters
    ----------
    questions : int
    images : int
        Images of a set.
    boards : int
        Boards that all sets are drawn from.

    Raises
    ------
    InputError
        If a set is larger than what it is drawn from.
    """
    from conduit_kv.tasks import needles
    from conduit_kv.tasks.registry import training_boards

    if not 2 <= images <= boards // 2:
        raise InputError(
            f"sets of {images} of {boards} boards: take 2 images to half of the boards"
        )
    pool = training_boards(boards)
    number_of = {board: number for number, board in enumerate(pool)}
    kinds = ("which-image", "where", "left-of", "which-images")
    examples = []
    for number in range(questions):
        kind, rng = kinds[number % 4], random.Random(f"retoken {seed} {number}")
        if kind == "which-images":
            item = needles.multi_needle_item(rng, "", pool, images, "train", kind)
        else:
            near = bool(number // 4 % 2)
            item = needles.needle_item(rng, "", pool, images, "train", kind, distractors=near)
        shown = tuple(number_of[board] for board in item.sources if isinstance(board, Board))
        examples.append(Example(item.question, shown, item.gold))
    name = f"{boards} boards, {images} at a time, seed {seed}"
    return Data(name, [board.image() for board in pool], tuple(examples))


def folder_data(folder: Path) -> Data:
    """Read ``FOLDER/questions.jsonl``: ``{"question": ..., "images": [...], "gold": [0]}`` a line.

    Images are named relative to the folder; ``gold`` counts from 0.

    Raises
    ------
    InputError
        If the file is not there or a line cannot be used; the message names the line.
    """
    file = folder.expanduser() / "questions.jsonl"
    if not file.is_file():
        raise InputError(f'{file} is missing: one {{"question", "images", "gold"}} a line')
    names: dict[Path, int] = {}
    examples = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            paths = [file.parent / name for name in entry["images"]]
            gold = tuple(int(place) for place in entry["gold"])
            question = str(entry["question"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}, line {number}: {error!r}") from None
        if len(paths) < 2 or not gold or not all(0 <= place < len(paths) for place in gold):
            raise InputError(f"{file}, line {number}: two images or more, and gold among them")
        if len(gold) == len(paths):
            raise InputError(f"{file}, line {number}: every image is gold, so nothing is learned")
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise InputError(f"{file}, line {number}: {missing[0]} is missing")
        numbers = tuple(names.setdefault(path, len(names)) for path in paths)
        examples.append(Example(question, numbers, gold))
    if not examples:
        raise InputError(f"{file} is empty")
    return Data(str(file), list(names), tuple(examples))


# -- what the frozen model gives -------------------------------------------------------------------


class _FirstLayers(RequestCache):
    """Runs the first layers only, and keeps what enters each."""

    def __init__(self, run: Run, layers: int) -> None:
        text_model = run.family.text_model(run.model)
        super().__init__(["full"] * len(run.family.layers(text_model)), Plan())
        self._family, self._text_model, self._layers = run.family, text_model, layers
        self.states: list[Tensor] = []

    def run(
        self, stack: Any, embeddings: Tensor, position_ids: Tensor, features: Mapping[str, Any]
    ) -> Any:
        self.states = early_states(
            self._family, self._text_model, embeddings, self._layers, position_ids, features
        )
        return text_output(embeddings, self, None)


@torch.inference_mode()
def stored_in(
    vlm: Runner, image: ImageLike, layers: Sequence[int], space: Literal["value", "key"]
) -> Tensor:
    """``[l, G, n, d]`` bf16: what an image prefilled alone stores in some layers, normalised."""
    inputs = vlm.process(vlm.render([{"role": "user", "content": [{"type": "image"}]}]), [image])
    run = Run(vlm.model, vlm.family, Plan())
    cache = _FirstLayers(run, max(layers))
    with lock_of(vlm.model), wrapped(run):
        vlm.model(**inputs, **{cache_name(type(vlm.model)): cache}, logits_to_keep=1)
    visual = cache.progress.layouts[0].visual
    family, text_model = vlm.family, vlm.family.text_model(vlm.model)
    stored = family.values if space == "value" else family.keys
    found = [
        stored(family.layers(text_model)[layer], cache.states[layer][:, visual])[0]
        for layer in layers
    ]
    return F.normalize(torch.stack(found).float(), dim=-1).bfloat16()


def prompt_ids(vlm: Runner, question: str) -> Tensor:
    """``[n]`` int64: what stands before a first image, and what stands after the last one."""
    content = [{"type": "image"}, {"type": "text", "text": question}]
    white = Image.new("RGB", (64, 64), "white")
    inputs = vlm.process(vlm.render([{"role": "user", "content": content}]), [white])
    ids: Tensor = inputs["input_ids"][0].cpu()
    last = int(vlm.family.visual_mask(vlm.model, ids).nonzero()[-1])
    prefix = torch.tensor(vlm.shelf().context("template"), dtype=torch.long)
    return torch.cat([prefix, ids[last + 1 :]])


# -- training --------------------------------------------------------------------------------------


class _Token(nn.Module):
    """What is trained."""

    def __init__(self, start: Tensor, deviation: Tensor, heads: Sequence[int]) -> None:
        super().__init__()
        # A copy: the token begins as a word of the model, which must not change with it.
        self.register_buffer("start", start.detach().float().clone())
        self.register_buffer("deviation", deviation.float())
        self.change = nn.Parameter(torch.zeros_like(start, dtype=torch.float32))
        self.temperature = nn.Parameter(torch.full(tuple(heads), _START_TEMPERATURE))

    @property
    def embedding(self) -> Tensor:
        """``[D]``."""
        return self.start + self.deviation * self.change  # type: ignore[operator]


class _Heard:
    """A cache that keeps K and V of each layer, ``[B, G, n, d]``, and gives them back."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Transformers' contract."""
        self.pairs.append((keys, values))
        return keys, values


class _Behind:
    """A cache of texts of different length, padded at their end, before one more row."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Transformers' contract."""
        old_keys, old_values = self._pairs[layer]
        return torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """``[B, G, n, d]`` of ``[G, n_b, d]``."""
    longest = max(part.shape[1] for part in parts)
    return torch.stack([F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts])


class Trainer:
    """Trains the token of one model; :meth:`run` goes on where a file of its state left off.

    Parameters
    ----------
    vlm : Runner
    data : Data
    settings : Settings
    out : Path
        The artefact; ``OUT.training`` beside it holds the state until training is done.
    """

    def __init__(self, vlm: Runner, data: Data, settings: Settings, out: Path) -> None:
        self.vlm, self.data, self.settings, self.out = vlm, data, settings, out
        self.family, self.text_model = vlm.family, vlm.family.text_model(vlm.model)
        total = len(self.family.layers(self.text_model))
        self.layers = tuple(sorted({int(depth * total) for depth in settings.depths}))
        self._total = total
        self._embed: Any = self.text_model.get_input_embeddings()  # type: ignore[operator]
        self._stored: dict[int, Tensor] = {}
        self._prompts: dict[str, Tensor] = {}
        self._texts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._rows: dict[str, list[Text]] = {}
        self.losses: list[float] = []

    @property
    def state_file(self) -> Path:
        """Where the state lies while training is not done."""
        return self.out.with_name(self.out.name + ".training")

    def run(self, progress: Progress = lambda *_: None) -> Artefact:
        """Train, write the artefact, and give it.

        Raises
        ------
        InputError
            If a state of other settings or another model is in the way.
        """
        self.read_images(progress)
        self.read_questions(self.data.examples, progress)
        token = self._new_token()
        optimiser = torch.optim.AdamW(
            [
                {"params": [token.change], "lr": self.settings.learning_rate},
                {"params": [token.temperature], "lr": 0.02},
            ],
            weight_decay=0.0,
        )
        first = self._resume(token, optimiser)
        steps = self.settings.steps
        for step in range(first, steps):
            # Cosine decay; a tenth of the steps to warm up.
            warm = min(1.0, (step + 1) / max(1, steps // 10))
            factor = warm * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group, rate in zip(
                optimiser.param_groups, (self.settings.learning_rate, 0.02), strict=True
            ):
                group["lr"] = rate * factor
            rng = random.Random(f"{self.settings.seed} {step}")
            batch = [rng.choice(self.data.examples) for _ in range(self.settings.batch)]
            loss = self.loss(token, batch)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            self.losses.append(float(loss.detach()))
            progress("training", step + 1, steps, self.losses[-1])
            if (step + 1) % _EVERY == 0 and step + 1 < steps:
                self._write_state(token, optimiser, step + 1)
        artefact = self.artefact(token)
        artefact.save(self.out)
        self.state_file.unlink(missing_ok=True)
        return artefact

    def read_images(self, progress: Progress = lambda *_: None) -> None:
        """Run the first layers over each image that a question shows, once."""
        wanted = sorted({number for e in self.data.examples for number in e.images})
        for done, number in enumerate(wanted, start=1):
            if number not in self._stored:
                self._stored[number] = stored_in(
                    self.vlm, self.data.images[number], self.layers, self.settings.space
                )
            progress("reading images", done, len(wanted), None)

    def loss(self, token: _Token, batch: Sequence[Example]) -> Tensor:
        """Mean over questions of the cross-entropy of the images that hold the answer."""
        asked = self._ask(token, batch)  # [l, B, G, h, d]
        losses = []
        for row, example in enumerate(batch):
            scores = self.image_scores(token, asked[:, row], example.images)
            log_shares = scores.log_softmax(0)
            losses.append(-log_shares[list(example.gold)].mean())
        return torch.stack(losses).mean()

    def image_scores(self, token: _Token, asked: Tensor, images: Sequence[int]) -> Tensor:
        """``[U]``: scores of images by what a question asks for, ``[l, G, h, d]``."""
        stored = [self._stored[number].to(asked.device).float() for number in images]
        unit = torch.repeat_interleave(
            torch.arange(len(images)), torch.tensor([part.shape[2] for part in stored])
        ).to(asked.device)
        heads = cosines(asked, torch.cat(stored, dim=2)) * token.temperature.exp()[..., None]
        return unit_softmax_means(heads.mean((0, 1, 2)), unit)

    def _ask(self, token: _Token, batch: Sequence[Example]) -> Tensor:
        """``[l, B, G, h, d]``: what the embedding asks for behind each question."""
        texts = [self._texts[example.question] for example in batch]
        device = self._embed.weight.device
        lengths = torch.tensor([part[0][0].shape[1] for part in texts], device=device)
        layers = max(self.layers)
        stacked = _Behind(
            [
                (_padded([t[layer][0] for t in texts]), _padded([t[layer][1] for t in texts]))
                for layer in range(layers)
            ]
        )
        longest = int(lengths.max())
        seen = torch.arange(longest + 1, device=device) < lengths[:, None]
        seen[:, -1] = True
        rows = token.embedding.to(self._embed.weight.dtype).expand(len(batch), 1, -1)
        place = lengths[:, None]
        if self.family.position_axes > 1:
            place = place.expand(self.family.position_axes, -1, -1)
        with lock_of(self.vlm.model):
            states = early_states(
                self.family,
                self.text_model,
                rows,
                layers,
                place,
                cache=stacked,
                mask=seen[:, None, None],
            )
        seen = seen[:, self._prefix :]
        asked = []
        for at, number in enumerate(self.layers):
            layer = self.family.layers(self.text_model)[number]
            parts = [self._rows[example.question][at] for example in batch]
            rows_read = Text(_padded([p.keys for p in parts]), _padded([p.read for p in parts]))
            text = rows_read.then(Text.of(self.family, layer, states[number], self.settings.space))
            asked.append(read(self.family, layer, states[number][:, 0], text, seen))
        return torch.stack(asked)

    @torch.no_grad()
    def read_questions(
        self, examples: Sequence[Example], progress: Progress = lambda *_: None
    ) -> None:
        """Run the first layers over each question, once: they do not see what comes after them."""
        wanted = [q for q in dict.fromkeys(e.question for e in examples) if q not in self._texts]
        device = self._embed.weight.device
        for start in range(0, len(wanted), 16):
            questions = wanted[start : start + 16]
            prompts = [self._prompt(question) for question in questions]
            ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)
            heard = _Heard()
            with lock_of(self.vlm.model):
                states = early_states(
                    self.family, self.text_model, self._embed(ids), max(self.layers), cache=heard
                )
            texts = [
                Text.of(
                    self.family,
                    self.family.layers(self.text_model)[layer],
                    states[layer][:, self._prefix :],
                    self.settings.space,
                )
                for layer in self.layers
            ]
            for row, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
                self._texts[question] = [
                    (keys[row, :, : len(prompt)].clone(), values[row, :, : len(prompt)].clone())
                    for keys, values in heard.pairs
                ]
                own = len(prompt) - self._prefix
                self._rows[question] = [
                    Text(text.keys[row, :, :own].clone(), text.read[row, :, :own].clone())
                    for text in texts
                ]
            progress("reading questions", start + len(questions), len(wanted), None)

    @cached_property
    def _prefix(self) -> int:
        """Tokens before a first image: they are no part of what is asked."""
        return len(self.vlm.shelf().context("template"))

    def _prompt(self, question: str) -> Tensor:
        if question not in self._prompts:
            self._prompts[question] = prompt_ids(self.vlm, question).cpu()
        return self._prompts[question]

    def recall(self, token: _Token | Artefact, examples: Sequence[Example]) -> float:
        """Share of questions whose best image holds the answer."""
        if isinstance(token, Artefact):
            found = self._new_token()
            with torch.no_grad():
                found.start.copy_(token.tensors["embedding"])  # type: ignore[operator]
                found.temperature.copy_(token.tensors["temperature"])
            token = found
        hits = 0
        self.read_questions(examples)
        with torch.no_grad():
            for start in range(0, len(examples), self.settings.batch):
                batch = examples[start : start + self.settings.batch]
                asked = self._ask(token, batch)
                for row, example in enumerate(batch):
                    scores = self.image_scores(token, asked[:, row], example.images)
                    hits += int(scores.argmax()) in example.gold
        return hits / max(1, len(examples))

    def artefact(self, token: _Token) -> Artefact:
        """What is written."""
        config = {
            "scored_layers": list(self.layers),
            "space": self.settings.space,
            "settings": asdict(self.settings),
            "data": self.data.name,
            "questions": len(self.data.examples),
            "images": len(self._stored),
            "loss": sum(self.losses[-20:]) / max(1, len(self.losses[-20:])),
            "model_name": self.vlm.name,
        }
        tensors = {
            "embedding": token.embedding.detach(),
            "temperature": token.temperature.detach().clone(),
        }
        return Artefact(KIND, weights_digest(self.text_model), self._total, config, tensors)

    # -- going on ----------------------------------------------------------------------------

    def _new_token(self) -> _Token:
        for parameter in self.vlm.model.parameters():
            parameter.requires_grad_(False)
        some = self._prompt(self.data.examples[0].question)
        embeddings = self._embed.weight.detach()
        start = embeddings[int(some[-1])]
        config: Any = self.text_model.config
        kv_heads = config.num_key_value_heads
        heads = (len(self.layers), kv_heads, config.num_attention_heads // kv_heads)
        return _Token(start, embeddings.float().std(), heads).to(embeddings.device)

    def _identity(self) -> dict[str, Any]:
        return {
            "settings": json.loads(json.dumps(asdict(self.settings))),
            "data": self.data.name,
            "questions": len(self.data.examples),
            "model": weights_digest(self.text_model),
        }

    def _write_state(self, token: _Token, optimiser: torch.optim.Optimizer, step: int) -> None:
        part = self.state_file.with_name(self.state_file.name + ".part")
        state = {
            "identity": self._identity(),
            "step": step,
            "token": token.state_dict(),
            "optimiser": optimiser.state_dict(),
            "losses": self.losses,
        }
        torch.save(state, part)
        part.replace(self.state_file)

    def _resume(self, token: _Token, optimiser: torch.optim.Optimizer) -> int:
        if not self.state_file.is_file():
            return 0
        try:
            state = torch.load(self.state_file, weights_only=True, map_location="cpu")
        except Exception as error:
            raise InputError(
                f"{self.state_file} cannot be read ({error}): delete it to start over"
            ) from None
        if state["identity"] != self._identity():
            raise InputError(
                f"{self.state_file} belongs to other settings, data or another model: go on as it "
                "was begun, name another --out, or delete it to start over"
            )
        token.load_state_dict(state["token"])
        optimiser.load_state_dict(state["optimiser"])
        self.losses = list(state["losses"])
        return int(state["step"])
