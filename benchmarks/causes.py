"""Why an evict method wins or loses: what was kept of the place where the answer lies.

    python benchmarks/causes.py --json benchmarks/results/causes.json

For every item of a late task the visual tokens of the pictures that decide the answer are known.
Three questions are answered, per task:

1. Which rows look at the answer? Per layer and kind of row (words of the question, the tokens that
   close the turn, the newest token, numbers of images, text in between): the share of its attention
   to visual tokens that falls on the answer, over the answer's share of the visual tokens. 1 is
   chance.
2. How much of the answer did each plan keep, mean over layers, against its share of all visual
   tokens?
3. How often is a plan right, by how much of the answer it kept?
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.progress import track
from torch import Tensor

import conduit_kv as ckv
from conduit_kv.bench.protocols import answer, prompt_of
from conduit_kv.layout import Layout
from conduit_kv.methods.evict import EvictMethod, Scores
from conduit_kv.tasks import Item, get_task
from conduit_kv.tasks.scenes import CELL, SIZE, Board, Picture, plural
from conduit_kv.view import LayerView

TASKS = ("board-sparse-late", "haystack-8-late")
METHODS = (
    "tgv-kv:{}(of=visual)",
    "tgv-kv:{}(of=visual, rows=last)",
    "tgv-kv:{}(of=visual, rows=all)",
    "snapkv:{}(of=visual)",
    "h2o:{}(of=visual)",
    "text-random:{}(of=visual)",
)
SHARES = ("0.2", "0.1", "0.05")


def deciding(item: Item) -> list[tuple[int, Picture]]:
    """The pictures that decide an item's answer, each with the number of its image (from 0)."""
    boards = [board for board in item.sources if isinstance(board, Board)]
    named = re.search(r"image (\d+)", item.question)
    only = int(named[1]) - 1 if named else None
    cell = re.search(r"row (\d), column (\d)", f"{item.question} {item.answer}")
    found = []
    for image, board in enumerate(boards):
        for picture in board.pictures:
            asked = f"the {picture.name}?" in item.question
            here = cell is not None and cell.groups() == (str(picture.row), str(picture.column))
            counted = item.kind == "how-many" and (
                f" {picture.colour} pictures" in item.question
                or f" {plural(picture.kind)} " in item.question
            )
            left = item.kind == "left-of" and picture.name == item.answer
            by_place = here and (len(boards) == 1 or only == image)
            if by_place or (only in (None, image) and (asked or counted or left)):
                found.append((image, picture))
    return found


def answer_tokens(item: Item, layout: Layout) -> Tensor:
    """``[T]`` bool: visual tokens whose centre lies in the cell of a deciding picture."""
    side = SIZE // 14
    tokens = torch.zeros(len(layout), dtype=torch.bool)
    row, column = layout.row * side + side // 2, layout.column * side + side // 2
    for image, picture in deciding(item):
        tokens |= (
            (layout.image == image)
            & (row // CELL == picture.row - 1)
            & (column // CELL == picture.column - 1)
        )
    return tokens


@dataclass(frozen=True)
class Probe(EvictMethod):
    """Evicts nothing: writes down how much each row looks at the answer."""

    name: ClassVar[str] = "probe"

    kinds: Any = field(default=None, compare=False)
    wanted: Any = field(default=None, compare=False)
    seen: Any = field(default=None, compare=False)

    @property
    def is_identity(self) -> bool:
        return False

    def score(self, view: LayerView) -> Scores:
        visual = view.layout.visual
        chance = float(self.wanted.sum() / visual.sum())
        for kind, rows in self.kinds.items():
            if not len(rows):
                continue
            looks = view.attention(rows).mean(0)
            share = looks[:, self.wanted].sum(-1) / looks[:, visual].sum(-1)
            self.seen[kind][view.layer].append(float(share.mean()) / chance)
        return Scores(torch.zeros(view.size))


def kinds_of_rows(vlm: ckv.VLM, ids: list[int], layout: Layout, question: str) -> dict[str, Tensor]:
    """Text rows after the first image by what they are: ``[R]`` int64 each."""
    text = torch.nonzero(layout.text & (torch.arange(len(layout)) > layout.first_visual)).flatten()
    last_image = int(torch.nonzero(layout.visual).max())
    words = len(vlm.tokenizer(question, add_special_tokens=False)["input_ids"])
    tail = text[text > last_image]
    # After the last image: a line break, the question, and what closes the turn.
    start = next(
        i for i in range(len(tail))
        if vlm.tokenizer.decode([ids[t] for t in tail[i : i + words].tolist()]).strip() == question
    )  # fmt: skip
    return {
        "between images": text[text < last_image],
        "question": tail[start : start + words],
        "end of turn": tail[start + words :],
        "newest": tail[-1:],
    }


def task_causes(vlm: ckv.VLM, name: str, n: int) -> dict[str, Any]:
    task = get_task(name)
    plans = [ckv.Plan()] + [ckv.Plan.parse(m.format(s)) for m in METHODS for s in SHARES]
    looks: Any = defaultdict(lambda: defaultdict(list))
    kept: dict[str, list[float]] = defaultdict(list)
    right: dict[str, list[float]] = defaultdict(list)
    for item in track(task.items(n), description=name):
        prompt = prompt_of(vlm, item, task.protocol)
        probe = Probe(kinds={}, wanted=None, seen=looks)
        state = vlm.prefill(prompt.head, "full")
        layout = state.cache.progress.layouts[0]
        wanted = answer_tokens(item, layout)
        if not wanted.any():
            continue
        rows = kinds_of_rows(vlm, state.ids, layout, item.question)
        probe = Probe(kinds=rows, wanted=wanted, seen=looks)
        state = vlm.prefill(prompt.head, "full", watch=[ckv.Plan((probe,)), *plans])
        forks = vlm.forks(state, [ckv.Plan((probe,)), *plans])[1:]
        for plan, fork in zip(plans, forks, strict=True):
            held = [fork.cache.held(layer) for layer in range(len(fork.cache))]
            share = [float(wanted[tokens].sum() / wanted.sum()) for tokens in held]
            kept[str(plan)].append(sum(share) / len(share))
        for plan, outcome in zip(plans, answer(vlm, prompt, plans), strict=True):
            right[str(plan)].append(task.score(outcome.text, item))
    rows_seen = {
        kind: [round(sum(values) / len(values), 3) for _, values in sorted(layers.items())]
        for kind, layers in looks.items()
    }
    return {
        "n": len(kept["full"]),
        "looks_over_chance": rows_seen,
        "plans": {plan: _by_kept(kept[plan], right[plan]) for plan in kept},
    }


def _by_kept(kept: list[float], right: list[float]) -> dict[str, Any]:
    """Accuracy overall and by thirds of how much of the answer was kept."""
    order = sorted(range(len(kept)), key=kept.__getitem__)
    third = max(len(order) // 3, 1)
    parts = [order[:third], order[third : 2 * third], order[2 * third :]]
    return {
        "answer_kept": round(sum(kept) / len(kept), 4),
        "accuracy": round(sum(right) / len(right), 4),
        "by_third": [
            {
                "answer_kept": round(sum(kept[i] for i in part) / len(part), 4),
                "accuracy": round(sum(right[i] for i in part) / len(part), 4),
            }
            for part in parts
            if part
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--n", type=int, default=60)
    parser.add_argument("--task", action="append")
    options = parser.parse_args()
    vlm = ckv.load("embedded", device="cpu")
    found = {name: task_causes(vlm, name, options.n) for name in options.task or TASKS}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
