"""Compare what this package keeps with what kvpress kept.

    python -m tests.oracle.compare indices.json

``indices.json`` and the ``.safetensors`` beside it come from ``kvpress_indices.py``. The same
weights become the text model of a tiny LLaVA and a tiny Qwen3-VL, whose text attention is Llama's
and Qwen3's; the same prompts, without images, run under :func:`conduit_kv.compress`.

Of each layer and KV head the tokens kept must be the same, where the scores say which: where
kvpress' score of the last token kept exceeds that of the first one evicted by more than ``GAP``.
Otherwise the two may differ among the tokens within ``GAP`` of that place, and only there.

Where the methods differ on purpose, the rest is compared all the same:

- A layer keeps at least ``FLOOR`` tokens here. Where kvpress keeps fewer, ours must be the first
  ``FLOOR`` of kvpress' ranking. (StreamingLLMPress then drops even the last token.)
- Where the budget is smaller than the window, kvpress scores the whole window alike and keeps
  an arbitrary part of it. Ours must be its newest tokens, and both part of the window.
- PyramidKV: kvpress rounds each layer's number for itself, ours round under a total, here kvpress'
  own. With ``schedule=kvpress`` each layer's number must be the same. The default
  ``schedule=paper`` gives each layer its window and lays the line over what is left, where kvpress
  lays it over everything: the total must be the same, and the tokens the first of kvpress' ranking.
- kvpress' SnapKV refuses a prompt that is not longer than its window; ours takes it, uncompared.
- kvpress truncates ``T (1 - ratio)`` in each layer; ours rounds the total over the layers. So
  budgets are given as the numbers that kvpress kept.
- kvpress' defaults are other ones (``window=64``): each case names its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

import conduit_kv as ckv
from conduit_kv.methods.evict.base import FLOOR
from tests.tiny import tiny_model

GAP = 1e-5
"""Scores closer than this are a tie: two builds of the same sum may order them either way."""
TOLERANCE = 1e-4
"""Between logits, fp32, of two releases of Transformers."""
OURS = {"llama": "llava", "qwen3": "qwen3-vl"}
"""Which tiny model has a text model of kvpress' kind."""
SWEEP = (40, 0.5)
"""Tokens and ratio of the cases with which every budget is tried, not only kvpress' own."""
NAMES = {
    "SnapKVPress": "snapkv",
    "KnormPress": "knorm",
    "TOVAPress": "tova",
    "StreamingLLMPress": "streaming-llm",
    "PyramidKVPress": "pyramidkv",
    "AdaKVPress": "ada-kv",
}
OPTIONS = {
    "window_size": "window",
    "kernel_size": "kernel",
    "n_sink": "sinks",
    "beta": "beta",
    "alpha_safeguard": "alpha",
}
CLEAR, NEAR, ALIKE = "clear", "near-ties", "scored alike"
"""How kvpress' scores settle a kept set: uniquely; not within GAP; not among tokens that it scores
alike."""


@dataclass
class Case:
    """What kvpress kept of one prompt, and why."""

    label: str
    model: str
    tokens: int
    press: str
    options: dict[str, Any]
    compression_ratio: float
    kept: list[list[list[int]]]
    scores: Tensor
    """``[L, G, T]``"""

    @property
    def window(self) -> int:
        """Tokens at the end that kvpress scores alike, above all others."""
        return int(self.options.get("window_size", 0))

    @property
    def counts(self) -> list[int]:
        """Tokens kept in each layer, mean over its KV heads."""
        sums = [sum(len(head) for head in layer) for layer in self.kept]
        heads = len(self.kept[0])
        if any(number % heads for number in sums):
            raise ValueError(f"{self.label}: the heads of a layer do not share a whole number")
        return [number // heads for number in sums]

    def plan(self, budget: str | int | float, **options: Any) -> str:
        """The plan that is this press, with another budget and options of ours."""
        options |= {OPTIONS[key]: value for key, value in self.options.items()}
        inside = ", ".join(f"{key}={value}" for key, value in options.items())
        return f"{NAMES[self.press]}:{budget}" + (f"({inside})" if inside else "")


@dataclass
class Cell:
    """The kept sets of one line of the table in one column."""

    same: int = 0
    how: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"{self.same}/{self.how[CLEAR] + self.how[NEAR]}"


class Comparison:
    """Everything compared, and what was wrong."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.models: dict[str, PreTrainedModel] = {}
        self.table: dict[str, dict[str, Cell]] = {}
        self.problems: list[str] = []

    # -- our side --------------------------------------------------------------------------------

    def take_model(self, name: str, text: dict[str, Any]) -> None:
        """Put kvpress' weights into the text model of one of ours, and check the logits."""
        model = copy.deepcopy(tiny_model(OURS[name])[0])
        config = model.config.text_config
        for key, value in text.items():
            mine = getattr(config, key, value)
            if key == "rope_parameters":
                mine = {part: mine[part] for part in value}
            if mine != value:
                raise SystemExit(f"{OURS[name]}: {key} is {mine} here and {value} there")
        start = f"weights.{name}."
        weights = {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}
        model.lm_head.weight.data.copy_(weights.pop("lm_head.weight"))
        weights = {key.removeprefix("model."): value for key, value in weights.items()}
        model.model.language_model.load_state_dict(weights, strict=True)
        self.models[name] = model
        for key, theirs in self.tensors.items():
            if key.startswith(f"logits.{name}."):
                ids = self.tensors[f"prompt.{key.rpartition('.')[2]}"]
                with torch.no_grad():
                    ours = model(input_ids=ids[None]).logits[0, -1]
                error = float((ours - theirs).abs().max())
                if error > TOLERANCE:
                    self.problems.append(f"{key}: logits differ by {error:.1e} before any eviction")

    def held(self, case: Case, plan: str) -> list[list[list[int]]]:
        """What this package keeps, per layer and KV head."""
        model, ids = self.models[case.model], self.tensors[f"prompt.{case.tokens}"]
        with torch.no_grad(), ckv.compress(model, plan) as run:
            model(input_ids=ids[None])
        layers, heads = case.scores.shape[:2]
        return [
            [run.cache.held(layer, 0, head).tolist() for head in range(heads)]
            for layer in range(layers)
        ]

    # -- comparing -------------------------------------------------------------------------------

    def compare(self, case: Case) -> None:
        """One case, with the number of tokens that kvpress kept."""
        if case.press == "PyramidKVPress":
            self.pyramid(case, "kvpress")
            self.pyramid(case, "paper")
            return
        (count,) = set(case.counts)
        self.number(case, str(case.compression_ratio), count)
        ranked = case.press in ("SnapKVPress", "KnormPress", "TOVAPress")
        if ranked and (case.tokens, case.compression_ratio) == SWEEP:
            for budget in range(1, case.tokens):
                self.number(case, "every budget", budget)

    def number(self, case: Case, column: str, count: int) -> None:
        """One case under a budget of ``count`` tokens in each layer."""
        plan = case.plan(count)
        numbers = count >= FLOOR and set(case.counts) == {count}
        kept = self.layers(case, column, plan, numbers=numbers)
        for layer, heads in enumerate(kept):
            mean = sum(len(tokens) for tokens in heads) / len(heads)
            if mean != max(count, FLOOR):
                self.problems.append(f"{case.label}, {plan}, layer {layer}: {mean} tokens a head")

    def pyramid(self, case: Case, schedule: str) -> None:
        """PyramidKV with kvpress' total; ``schedule`` says whose line over the layers."""
        share = sum(case.counts) / (len(case.counts) * case.tokens)
        plan = case.plan(share, schedule=schedule)
        kept = self.layers(case, str(case.compression_ratio), plan)
        ours = [len(layer[0]) for layer in kept]
        if min(case.counts) < FLOOR:
            return
        same = ours == case.counts if schedule == "kvpress" else sum(ours) == sum(case.counts)
        if not same:
            self.problems.append(f"{case.label}, {plan}: layers keep {ours}, kvpress {case.counts}")

    def layers(
        self, case: Case, column: str, plan: str, *, numbers: bool = False
    ) -> list[list[list[int]]]:
        """Compare and give what every layer and KV head keeps.

        Parameters
        ----------
        column : str
            Of the table.
        numbers : bool
            Whether each head keeps as many tokens as kvpress.
        """
        kept = self.held(case, plan)
        line = re.sub(r":[^(]*", "", plan)
        cell = self.table.setdefault(line, {}).setdefault(column, Cell())
        for layer, (heads, theirs) in enumerate(zip(kept, case.kept, strict=True)):
            where = f"{case.label}, {plan}, layer {layer}"
            counts, wanted = [len(head) for head in heads], [len(head) for head in theirs]
            settled = settles_heads(case, layer) or sum(counts) != sum(wanted)
            if numbers and counts != wanted and settled:
                self.problems.append(f"{where}: heads keep {counts} tokens, kvpress {wanted}")
            for head, (tokens, others) in enumerate(zip(heads, theirs, strict=True)):
                score = case.scores[layer, head]
                right = others if len(others) == len(tokens) else best(score, len(tokens))
                how, problem = judge(score, tokens, right, case.window)
                cell.same += how != ALIKE and tokens == right
                cell.how[how] += 1
                if problem:
                    self.problems.append(f"{where}, head {head}: {problem}")
        return kept


def best(score: Tensor, count: int) -> list[int]:
    """The ``count`` tokens of highest score, ascending; ties to the lower index."""
    order = score.sort(descending=True, stable=True).indices
    return sorted(order[:count].tolist())


def judge(score: Tensor, kept: list[int], right: list[int], window: int) -> tuple[str, str]:
    """How scores settle a kept set, and what is wrong with it.

    Parameters
    ----------
    score : Tensor
        ``[T]``, kvpress'.
    kept, right : list of int
        Ours and kvpress', as many.
    window : int
        Tokens at the end that kvpress scores alike.
    """
    count = len(kept)
    ordered = score.sort(descending=True).values.tolist()
    last, following = ordered[count - 1], ordered[count] if count < len(ordered) else -math.inf
    if last - following > GAP:
        return CLEAR, "" if kept == right else f"keeps {kept}, kvpress {right}"
    how = ALIKE if last == following else NEAR
    if count < window:
        newest = list(range(len(score) - count, len(score)))
        inside = min(right) >= len(score) - window
        return how, "" if kept == newest and inside else f"keeps {kept}, kvpress {right}"
    sure = set(torch.nonzero(score > last + GAP).flatten().tolist())
    never = set(torch.nonzero(score < following - GAP).flatten().tolist())
    wrong = sorted((sure - set(kept)) | (never & set(kept)))
    return how, f"keeps {kept}, kvpress {right}: more than a tie at {wrong}" if wrong else ""


def settles_heads(case: Case, layer: int) -> bool:
    """Whether scores settle how many tokens each head of a layer keeps: AdaKV's one ranking."""
    score = case.scores[layer].clone()
    count = sum(len(head) for head in case.kept[layer])
    safe = int(case.options.get("alpha_safeguard", 1.0) * (count // len(score)))
    for head in score:
        head[best(head, safe)] = math.inf
    ordered = score.flatten().sort(descending=True).values.tolist()
    return count == len(ordered) or ordered[count - 1] - ordered[count] > GAP


def show(table: dict[str, dict[str, Cell]]) -> Iterator[str]:
    """One line per plan: sets like kvpress' of those that its scores settle, and the others."""
    columns = sorted({column for cells in table.values() for column in cells})
    yield f"{'kept sets as in kvpress, by ratio removed':60}" + "".join(
        f"{column:>14}" for column in columns
    )
    for line, cells in table.items():
        how = hows(cells)
        yield (
            f"{line:60}"
            + "".join(f"{cells.get(column, '-')!s:>14}" for column in columns)
            + "".join(f"  {how[kind]} {kind}" for kind in (NEAR, ALIKE) if how[kind])
        )


def hows(cells: dict[str, Cell]) -> Counter[str]:
    """Over all columns of a line."""
    return sum((cell.how for cell in cells.values()), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare kept tokens with those of kvpress.")
    parser.add_argument("json", type=Path, help="what kvpress_indices.py wrote")
    path: Path = parser.parse_args().json
    if not path.is_file():
        parser.error(f"{path} is missing: 'make oracle' writes it, then compares")
    torch.set_num_threads(1)
    given = json.loads(path.read_text())
    comparison = Comparison(load_file(path.with_suffix(".safetensors")))
    for name in OURS:
        comparison.take_model(name, given["text"])
    cases = [
        Case(**row, scores=comparison.tensors[f"scores.{row['label']}"]) for row in given["cases"]
    ]
    for press in NAMES:
        if not any(case.press == press for case in cases):
            comparison.problems.append(f"{path} has no case of {press}")
    for case in cases:
        comparison.compare(case)
    problems = comparison.problems
    for line, cells in comparison.table.items():
        if 4 * (how := hows(cells))[NEAR] > how.total():
            problems.append(f"{line}: {how[NEAR]} near-ties of {how.total()} compare too little")
    print("\n".join(show(comparison.table)))
    if problems:
        print("\n".join(problems[:40]), file=sys.stderr)
        sys.exit(f"{len(problems)} differences from kvpress {given['versions']['kvpress']}")
    print(f"{len(cases)} cases agree with kvpress {given['versions']['kvpress']}")


if __name__ == "__main__":
    main()
