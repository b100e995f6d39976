"""Train the adapter of the embedded model, from a seed, on a CPU.

    python -m conduit_kv.embedded.train --out run --seed 0 --minutes 75

The CNN and the language model stay frozen. Trained are the tower's linear layer with row and column
embeddings, Llava's projector, and LoRA on every linear layer of the language model. Two stages:

1. align: without the language model, each visual token learns to point where the language model's
   own word embeddings of what lies there point (kind, colour, row, column). It takes two minutes
   and saves the first quarter of an hour of stage 2, in which nothing would be learned.
2. language: conversations of :mod:`.curriculum`, loss on the answers only.

Sequences are packed without padding. The decoder is written out below with fused projections
because it is the whole cost; ``tests/embedded`` checks that it equals Transformers' forward.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conduit_kv.embedded.curriculum import DATA_VERSION, Sample, draw_sample, single_question
from conduit_kv.embedded.parts import cnn_path, gguf_path
from conduit_kv.embedded.tower import EfficientNetLite0, fold_state_dict
from conduit_kv.tasks.scenes import CELL, COLOURS, KINDS, make_board, picture_boxes

RANK = 16
ALPHA = 32
TOKENS = 196
SIDE = 14
TOWER_WIDTH = 768
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
IMAGE_TOKEN = "<image>"


# --- frozen parts ---------------------------------------------------------------------------


def load_language_parts() -> tuple[dict[str, Tensor], Any, Any]:
    """State dict (bf16), config and tokenizer (with the image token) of the language model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = gguf_path()
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE_TOKEN]})
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return state, model.config, tokenizer


def load_cnn() -> EfficientNetLite0:
    cnn = EfficientNetLite0()
    cnn.load_state_dict(fold_state_dict(torch.load(cnn_path(), weights_only=True)))
    for parameter in cnn.parameters():
        # What inference will have: bf16 weights, whatever dtype it computes in.
        parameter.data = parameter.data.to(torch.bfloat16).float()
        parameter.requires_grad_(False)
    return cnn.eval().to(memory_format=torch.channels_last)  # type: ignore


def pixels(images: Sequence[Any]) -> Tensor:
    """Images to (n, 3, 224, 224), as the processor does it."""
    from PIL import Image

    arrays = [
        np.asarray(
            im if im.size == (224, 224) else im.resize((224, 224), Image.Resampling.BICUBIC),
            dtype=np.float32,
        )
        for im in images
    ]
    batch = torch.from_numpy(np.stack(arrays)) / 255.0
    batch = (batch - torch.tensor(MEAN)) / torch.tensor(STD)
    return batch.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


# --- trained parts --------------------------------------------------------------------------


class Eyes(nn.Module):
    """The tower's head and Llava's projector, on standardised CNN features."""

    def __init__(self, features: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("deviation", torch.ones(features))
        self.head = nn.Linear(features, TOWER_WIDTH)
        self.linear_1 = nn.Linear(TOWER_WIDTH, hidden)
        self.linear_2 = nn.Linear(hidden, hidden)
        for layer in (self.head, self.linear_1, self.linear_2):
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.zeros_(layer.bias)
        self.row = nn.Parameter(torch.randn(SIDE, TOWER_WIDTH, generator=generator) * 0.5)
        self.column = nn.Parameter(torch.randn(SIDE, TOWER_WIDTH, generator=generator) * 0.5)

    def forward(self, features: Tensor) -> Tensor:
        x = (features - self.mean) / self.deviation  # type: ignore[operator]
        places = (self.row[:, None] + self.column[None]).flatten(0, 1)
        x = F.gelu(self.head(x) + places)
        return self.linear_2(F.gelu(self.linear_1(x)))  # type: ignore[no-any-return]

    def folded(self) -> dict[str, Tensor]:
        """Parameters under the names of the built model, standardisation folded in."""
        weight = self.head.weight / self.deviation  # type: ignore[operator]
        tower, projector = "model.vision_tower.", "model.multi_modal_projector."
        return {
            tower + "head.weight": weight,
            tower + "head.bias": self.head.bias - weight @ self.mean,  # type: ignore[operator]
            tower + "row_embedding": self.row,
            tower + "column_embedding": self.column,
            projector + "linear_1.weight": self.linear_1.weight,
            projector + "linear_1.bias": self.linear_1.bias,
            projector + "linear_2.weight": self.linear_2.weight,
            projector + "linear_2.bias": self.linear_2.bias,
        }


@lru_cache(maxsize=256)
def _causal(rows: int, columns: int, groups: int) -> Tensor:
    """Additive mask of the last `rows` of `columns` positions, repeated for grouped heads."""
    mask = torch.full((rows, columns), float("-inf")).triu(columns - rows + 1)
    return mask.to(torch.bfloat16).repeat(groups, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: int = 320) -> Tensor:
    """Causal attention of one sequence: q (heads, T, d), k and v (kv heads, T, d).

    Up to about 1,500 tokens blocked products are faster forward and backward than SDPA here.
    """
    heads, length, width = q.shape
    kv_heads = k.shape[0]
    groups = heads // kv_heads
    if length > 1500:
        full = F.scaled_dot_product_attention(
            q[None],
            k.repeat_interleave(groups, 0)[None],
            v.repeat_interleave(groups, 0)[None],
            is_causal=True,
        )
        return full[0]
    grouped = q.view(kv_heads, groups, length, width)
    pieces = []
    count = max(1, round(length / block))
    bounds = [length * i // count for i in range(count + 1)]
    for start, end in pairwise(bounds):
        rows = grouped[:, :, start:end].reshape(kv_heads, -1, width)
        mask = _causal(end - start, end, groups).expand(kv_heads, -1, -1)
        scores = torch.baddbmm(mask, rows, k[:, :end].transpose(1, 2), alpha=width**-0.5)
        mixed = torch.bmm(scores.softmax(-1), v[:, :end])
        pieces.append(mixed.view(kv_heads, groups, end - start, width))
    return torch.cat(pieces, 2).reshape(heads, length, width)


class PackedLlama(nn.Module):
    """Llama's decoder over packed sequences, with LoRA, projections of one input fused."""

    def __init__(self, state: dict[str, Tensor], config: Any, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.width = config.hidden_size // self.heads
        self.embedding = state["model.embed_tokens.weight"]
        self.final_norm = state["model.norm.weight"]
        self.frozen: list[dict[str, Tensor]] = []
        self.lora = nn.ParameterDict()
        hidden, inner, kv = config.hidden_size, config.intermediate_size, self.kv_heads * self.width
        shapes = {
            "q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv), "o": (hidden, hidden),
            "gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden),
        }  # fmt: skip
        for layer in range(config.num_hidden_layers):
            base = f"model.layers.{layer}."

            def get(name: str, base: str = base) -> Tensor:
                return state[base + name + ".weight"]

            attention, mlp = "self_attn.", "mlp."
            self.frozen.append(
                {
                    "qkv": torch.cat([get(attention + f"{n}_proj") for n in "qkv"]),
                    "o": get(attention + "o_proj"),
                    "gate_up": torch.cat([get(mlp + "gate_proj"), get(mlp + "up_proj")]),
                    "down": get(mlp + "down_proj"),
                    "norm_1": get("input_layernorm"),
                    "norm_2": get("post_attention_layernorm"),
                }
            )
            for name, (inputs, outputs) in shapes.items():
                bound = math.sqrt(3 / inputs)
                a = torch.empty(RANK, inputs).uniform_(-bound, bound, generator=generator)
                self.lora[f"{layer}_{name}_a"] = nn.Parameter(a)
                self.lora[f"{layer}_{name}_b"] = nn.Parameter(torch.zeros(outputs, RANK))
        theta = config.rope_parameters["rope_theta"]
        steps = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        self.frequencies = 1.0 / theta**steps

    def _adapted(self, x: Tensor, weight: Tensor, layer: int, names: Sequence[str]) -> Tensor:
        a = torch.cat([self.lora[f"{layer}_{name}_a"] for name in names]).to(x.dtype)
        bs = [self.lora[f"{layer}_{name}_b"] for name in names]
        b = bs[0] if len(bs) == 1 else torch.block_diag(*bs)
        inner = F.linear(x, a)
        return torch.addmm(F.linear(x, weight), inner, (b * (ALPHA / RANK)).to(x.dtype).t())

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """(tokens, hidden) embeddings of sequences of these lengths to last hidden states."""
        eps = self.config.rms_norm_eps
        positions = torch.cat([torch.arange(length) for length in lengths]).float()
        angles = positions[:, None] * self.frequencies[None]
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
        half = self.width // 2
        cut = self.heads + self.kv_heads
        for layer, frozen in enumerate(self.frozen):
            y = F.rms_norm(x, (x.shape[-1],), frozen["norm_1"], eps)
            qkv = self._adapted(y, frozen["qkv"], layer, ("q", "k", "v"))
            qkv = qkv.view(len(x), -1, self.width)
            qk, v = qkv[:, :cut], qkv[:, cut:]
            turned = torch.cat([-qk[..., half:], qk[..., :half]], -1)
            qk = qk * cos + turned * sin
            qk, v = qk.transpose(0, 1), v.transpose(0, 1)
            pieces, start = [], 0
            for length in lengths:
                part = slice(start, start + length)
                pieces.append(
                    _attend(
                        qk[: self.heads, part].contiguous(),
                        qk[self.heads :, part].contiguous(),
                        v[:, part].contiguous(),
                    )
                )
                start += length
            mixed = torch.cat(pieces, 1).transpose(0, 1).reshape(len(x), -1)
            x = x + self._adapted(mixed, frozen["o"], layer, ("o",))
            y = F.rms_norm(x, (x.shape[-1],), frozen["norm_2"], eps)
            gate, up = self._adapted(y, frozen["gate_up"], layer, ("gate", "up")).chunk(2, -1)
            x = x + self._adapted(F.silu(gate) * up, frozen["down"], layer, ("down",))
        return F.rms_norm(x, (x.shape[-1],), self.final_norm, eps)


# --- samples to tokens ----------------------------------------------------------------------


@dataclass
class Encoded:
    """Token ids of a conversation, the weight of each as a label, and its pixels."""

    ids: list[int]
    weights: list[float]
    images: tuple[Any, ...]


class Encoder:
    """Conversations to token ids, as the chat template and the processor would give them."""

    def __init__(self, tokenizer: Any) -> None:
        self.image = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

        @lru_cache(maxsize=200_000)
        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self.encode = encode

    def __call__(self, sample: Sample) -> Encoded:
        ids: list[int] = []
        weights: list[float] = []

        def add(tokens: Sequence[int], weight: float = 0.0) -> None:
            ids.extend(tokens)
            weights.extend([weight] * len(tokens))

        for number, turn in enumerate(sample.turns):
            add(self.encode("<|im_start|>user\n"))
            if number == 0:
                for place in range(len(sample.images)):
                    if sample.first is not None:
                        add(self.encode(f"Image {sample.first + place}:"))
                    add([self.image] * TOKENS)
                    add(self.encode("\n"))
            add(self.encode(turn.question))
            add(self.encode("<|im_end|>\n<|im_start|>assistant\n"))
            add(self.encode(turn.answer + "<|im_end|>"), turn.weight)
            add(self.encode("\n"))
        return Encoded(ids, weights, sample.images)


class Learner:
    """Everything that one training step needs."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        state, config, tokenizer = load_language_parts()
        self.tokenizer = tokenizer
        self.encoder = Encoder(tokenizer)
        self.cnn = load_cnn()
        self.llama = PackedLlama(state, config, generator)
        self.eyes = Eyes(592, config.hidden_size, generator)
        self.scale = 1.5 * float(self.llama.embedding.float().std())

    @torch.no_grad()
    def features(self, images: Sequence[Any]) -> Tensor:
        return torch.cat([self.cnn(pixels(images[i : i + 8])) for i in range(0, len(images), 8)])

    def hidden(self, batch: Sequence[Encoded]) -> Tensor:
        """Last hidden states (tokens, hidden) of packed conversations."""
        ids = torch.tensor([token for item in batch for token in item.ids])
        places = (ids == self.encoder.image).nonzero()[:, 0]
        # The image token has no row in the frozen embedding; any row will do, it is overwritten.
        x = self.llama.embedding[ids.clamp(max=len(self.llama.embedding) - 1)]
        tokens = self.eyes(self.features([im for item in batch for im in item.images]))
        x = x.index_copy(0, places, tokens.flatten(0, 1).to(x.dtype))
        return self.llama(x, [len(item.ids) for item in batch])  # type: ignore[no-any-return]

    def logits(self, batch: Sequence[Encoded]) -> tuple[Tensor, Tensor, Tensor]:
        """Logits before each label, the labels, and their weights."""
        hidden = self.hidden(batch)
        ids = torch.tensor([token for item in batch for token in item.ids])
        weights = torch.tensor([weight for item in batch for weight in item.weights])
        rows = weights.nonzero()[:, 0]
        return F.linear(hidden[rows - 1], self.llama.embedding), ids[rows], weights[rows]

    def loss(self, batch: Sequence[Encoded]) -> Tensor:
        logits, labels, weights = self.logits(batch)
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return (losses * weights).sum() / weights.sum()

    @torch.no_grad()
    def score(self, batch: Sequence[Encoded]) -> float:
        """Share of conversations (of one question each) whose answer is all greedy tokens."""
        right, total = 0, 0
        for item in batch:
            logits, labels, _ = self.logits([item])
            right += bool((logits.argmax(-1) == labels).all())
            total += 1
        return right / total


# --- stage 1 --------------------------------------------------------------------------------


def _align_targets(boards: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per token: kind, colour, row, column; -100 where a token is of no one thing."""
    kinds, colours = list(KINDS), list(COLOURS)
    shape = (len(boards), SIDE, SIDE)
    kind = torch.full(shape, len(kinds))
    colour = torch.full(shape, -100)
    for number, board in enumerate(boards):
        for picture, box in zip(board.pictures, picture_boxes(board), strict=True):
            for y in range(SIDE):
                for x in range(SIDE):
                    wide = min(box[2], 16 * x + 16) - max(box[0], 16 * x)
                    high = min(box[3], 16 * y + 16) - max(box[1], 16 * y)
                    if wide <= 0 or high <= 0:
                        continue
                    if wide * high >= 0.35 * 256:
                        kind[number, y, x] = kinds.index(picture.kind)
                        colour[number, y, x] = colours.index(picture.colour)
                    elif kind[number, y, x] == len(kinds):
                        kind[number, y, x] = -100
    centres = torch.arange(SIDE) * 16 + 8
    lines = torch.where(centres % CELL == 0, -100, centres // CELL)
    row = lines[:, None].expand(SIDE, SIDE).expand(shape)
    column = lines[None].expand(SIDE, SIDE).expand(shape)
    return kind.flatten(), colour.flatten(), row.flatten(), column.flatten()


def standardise(learner: Learner, rng: random.Random) -> None:
    """Set mean and deviation of the CNN's features from some boards."""
    boards = [make_board(rng, "dense" if i % 3 else "sparse") for i in range(64)]
    seen = learner.features([board.image() for board in boards]).flatten(0, 1)
    learner.eyes.mean.copy_(seen.mean(0))  # type: ignore[operator]
    learner.eyes.deviation.copy_(seen.std(0) + 0.05)  # type: ignore[operator]


def align(learner: Learner, rng: random.Random, steps: int, log: Callable[..., None]) -> None:
    """Stage 1: visual tokens point where the word embeddings of what they show point."""
    table = learner.llama.embedding.float()
    table = table - table.mean(0)

    def words(names: Sequence[str]) -> Tensor:
        ids = [learner.encoder.encode(name) for name in names]
        return F.normalize(table[torch.tensor([i[-1] for i in ids])], dim=-1)

    classes = [
        words([f" {name}" for name in (*KINDS, "nothing")]),
        words([f" {name}" for name in COLOURS]),
        # Rows and columns are told apart by pointing at different words.
        words([" first", " second", " third", " fourth"]),
        words(["1", "2", "3", "4"]),
    ]
    eyes = learner.eyes
    standardise(learner, rng)
    optimizer = torch.optim.AdamW(eyes.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps) + 1e-5
        boards = [make_board(rng, "dense" if i % 3 else "sparse") for i in range(16)]
        tokens = eyes(learner.features([board.image() for board in boards])).flatten(0, 1)
        pointing = F.normalize(tokens, dim=-1)
        losses, right = [], []
        for vectors, target, weight in zip(
            classes, _align_targets(boards), (2.0, 1.0, 0.5, 0.5), strict=True
        ):
            logits = 25 * pointing @ vectors.t()
            # Empty cells are most of an image, and easy.
            balance = torch.ones(len(vectors))
            if len(vectors) == len(KINDS) + 1:
                balance[-1] = 0.1
            losses.append(weight * F.cross_entropy(logits, target, balance))
            known = (target >= 0) & (target != len(KINDS))
            right.append(float((logits.argmax(-1) == target)[known].float().mean()))
        loss = torch.stack(losses).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            names = ("kind", "colour", "row", "column")
            figures = dict(zip(names, (round(r, 3) for r in right), strict=True))
            log(stage="align", step=step, loss=round(float(loss), 3), **figures)
    with torch.no_grad():
        factor = learner.scale / float(tokens.std())
        eyes.linear_2.weight.mul_(factor)
        eyes.linear_2.bias.mul_(factor)


# --- stage 2 --------------------------------------------------------------------------------


def _batches(
    learner: Learner,
    rng: random.Random,
    progress: Callable[[], float],
    budget: int,
    counting: float,
) -> Iterator[list[Encoded]]:
    while True:
        batch: list[Encoded] = []
        while sum(len(item.ids) for item in batch) < budget:
            batch.append(learner.encoder(draw_sample(rng, progress(), counting)))
        yield batch


def load_adapter(eyes: Eyes, lora: nn.ParameterDict, path: Path) -> None:
    """Start from an exported adapter: the reverse of :func:`export`.

    The standardisation that `eyes` has is taken out of the exported weights again, so that one
    learning rate fits all features.
    """
    from safetensors.torch import load_file

    tensors = {name: tensor.float() for name, tensor in load_file(str(path)).items()}
    tower, projector = "model.vision_tower.", "model.multi_modal_projector."
    with torch.no_grad():
        weight = tensors[tower + "head.weight"]
        eyes.head.weight.copy_(weight * eyes.deviation)
        eyes.head.bias.copy_(tensors[tower + "head.bias"] + weight @ eyes.mean)
        eyes.row.copy_(tensors[tower + "row_embedding"])
        eyes.column.copy_(tensors[tower + "column_embedding"])
        for name, layer in (("linear_1", eyes.linear_1), ("linear_2", eyes.linear_2)):
            layer.weight.copy_(tensors[f"{projector}{name}.weight"])
            layer.bias.copy_(tensors[f"{projector}{name}.bias"])
        for name, parameter in lora.items():
            parameter.copy_(tensors[f"lora.{name.replace('_', '.')}"])


def export(learner: Learner, path: Path, metadata: dict[str, str]) -> None:
    """Write the trained part as bf16 safetensors, under the names of the built model."""
    from safetensors.torch import save_file

    tensors = dict(learner.eyes.folded())
    for name, tensor in learner.llama.lora.items():
        tensors[f"lora.{name.replace('_', '.')}"] = tensor
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()
    }
    temporary = path.with_suffix(".part")
    save_file(tensors, str(temporary), {**metadata, "rank": str(RANK), "alpha": str(ALPHA)})
    temporary.chmod(0o644)
    os.replace(temporary, path)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of log and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=75, help="length of stage 2")
    parser.add_argument("--steps", type=int, help="length of stage 2 in steps, instead of minutes")
    parser.add_argument("--align-steps", type=int, default=250)
    parser.add_argument("--tokens", type=int, default=1800, help="least tokens per step")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--start", type=Path, help="adapter to go on from, instead of stage 1")
    parser.add_argument(
        "--counting", type=float, default=0.0, help="share of samples that ask for numbers only"
    )
    args = parser.parse_args(argv)

    torch.set_flush_denormal(True)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.time()

    def log(**fields: Any) -> None:
        line = json.dumps({"s": round(time.time() - began, 1), **fields})
        print(line, flush=True)
        with (args.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")

    learner = Learner(args.seed)
    aligned = args.out / "align.pt"
    if args.start:
        standardise(learner, random.Random(args.seed))
        load_adapter(learner.eyes, learner.llama.lora, args.start)
    elif aligned.exists():
        learner.eyes.load_state_dict(torch.load(aligned, weights_only=True))
    else:
        align(learner, random.Random(args.seed), args.align_steps, log)
        torch.save(learner.eyes.state_dict(), aligned)

    eyes, lora = list(learner.eyes.parameters()), list(learner.llama.lora.values())
    # At the language model's rate the visual tokens lose what stage 1 taught them within a hundred
    # steps: they all take on one large common direction, and nothing is read from them any more.
    optimizer = torch.optim.AdamW(
        [{"params": eyes, "base": 0.1 * args.rate}, {"params": lora, "base": args.rate}],
        lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True,
    )  # fmt: skip
    rng = random.Random(args.seed + 1)
    step, spent = 0, 0.0
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=False)
        learner.eyes.load_state_dict(saved["eyes"])
        learner.llama.lora.load_state_dict(saved["lora"])
        optimizer.load_state_dict(saved["optimizer"])
        rng.setstate(saved["rng"])
        step, spent = saved["step"], saved["spent"]

    test_rng = random.Random(12345)
    tests = {
        kind: [learner.encoder(single_question(test_rng, kind)) for _ in range(number)]
        for kind, number in {
            "what": 12, "where": 12, "how-many": 16, "left-of": 14, "which-4": 5
        }.items()
    }  # fmt: skip
    start = time.time() - spent

    def progress() -> float:
        if args.steps:
            return float(min(1.0, step / args.steps))
        return float(min(1.0, (time.time() - start) / (60 * args.minutes)))

    def save() -> None:
        state = {
            "eyes": learner.eyes.state_dict(), "lora": learner.llama.lora.state_dict(),
            "optimizer": optimizer.state_dict(), "rng": rng.getstate(),
            "step": step, "spent": time.time() - start,
        }  # fmt: skip
        torch.save(state, checkpoint.with_suffix(".part"))
        os.replace(checkpoint.with_suffix(".part"), checkpoint)
        metadata = {
            "seed": str(args.seed), "steps": str(step), "data_version": str(DATA_VERSION),
            "minutes": f"{(time.time() - start) / 60:.1f}",
        }  # fmt: skip
        export(learner, args.out / "adapter.safetensors", metadata)

    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda caught, frame: stop.append(caught))
    losses: list[float] = []

    def stage() -> float:
        """What the mixture of samples goes by: who goes on from an adapter is past the start."""
        return 0.5 + 0.5 * progress() if args.start else progress()

    for batch in _batches(learner, rng, stage, args.tokens, args.counting):
        done = progress()
        if done >= 1.0 or stop:
            break
        factor = min(1.0, (step + 1) / 30) * min(1.0, (1 - done) / 0.45) + 0.01
        for group in optimizer.param_groups:
            group["lr"] = group["base"] * factor
        loss = learner.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(eyes + lora, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        step += 1
        if step % 10 == 0:
            log(
                stage="language", step=step, loss=round(sum(losses) / len(losses), 4),
                norm=round(float(norm), 3), progress=round(done, 4),
                tokens=sum(len(item.ids) for item in batch),
            )  # fmt: skip
            losses.clear()
        if step % 40 == 0:
            save()
        if step % 120 == 0:
            scores = {kind: round(learner.score(items), 3) for kind, items in tests.items()}
            log(stage="test", step=step, **scores)
    save()
    if stop:
        log(stage="stopped", step=step)
        return
    scores = {kind: round(learner.score(items), 3) for kind, items in tests.items()}
    log(stage="end", step=step, **scores)


if __name__ == "__main__":
    main()
