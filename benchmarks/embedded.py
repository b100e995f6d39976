"""Measure the embedded model on held-out questions.

    python benchmarks/embedded.py --n 500 --json figures.json

Greedy answers of plain Transformers, batched with left padding; with the right image and, for the
short single-image tasks, with the image of another item. Intervals are Wilson's, 95 %.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from conduit_kv.bench.stats import wilson
from conduit_kv.embedded.build import load_embedded
from conduit_kv.tasks import Item, Task, get_task, messages

TASKS = (
    "easy-vqa", "board", "board-sparse", "board-follow-up", "board-sparse-follow-up",
    "board-list", "board-sparse-list", "haystack-2", "haystack-4", "haystack-8", "haystack-16",
)  # fmt: skip
_WITH_WRONG_IMAGE = ("easy-vqa", "board", "board-sparse")


def wrong_images(items: Sequence[Item]) -> list[Item]:
    """The same questions, each with the images of another item of the same kind of question."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        by_kind[item.kind].append(number)
    out = list(items)
    for numbers in by_kind.values():
        for number, other in zip(numbers, numbers[1:] + numbers[:1], strict=True):
            out[number] = replace(items[number], sources=items[other].sources)
    return out


@torch.inference_mode()
def answer(model: Any, processor: Any, items: Sequence[Item], budget: int = 6000) -> list[str]:
    """Greedy answers to items, in their order.

    Parameters
    ----------
    model, processor
        As :func:`conduit_kv.embedded.load_embedded` gives them.
    items : sequence of Item
        Follow-ups are asked with the right answer to the first question in the chat.
    budget : int
        Most prompt tokens, padding included, in a batch.

    Returns
    -------
    list of str
    """
    texts = [
        processor.apply_chat_template(messages(item), add_generation_prompt=True) for item in items
    ]
    # About the same length together, so that little is padding.
    order = sorted(range(len(items)), key=lambda i: (len(items[i].sources), len(texts[i])))
    answers = [""] * len(items)
    while order:
        size = max(1, budget // (215 * len(items[order[0]].sources) + 40))
        batch, order = order[:size], order[size:]
        inputs = processor(
            images=[image for i in batch for image in items[i].images],
            text=[texts[i] for i in batch],
            return_tensors="pt",
            padding=True,
        ).to(model.device)
        out = model.generate(
            **inputs, max_new_tokens=max(items[i].max_new_tokens for i in batch), do_sample=False
        )
        new = processor.tokenizer.batch_decode(
            out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for i, text in zip(batch, new, strict=True):
            answers[i] = text
    return answers


def _row(task: Task, items: Sequence[Item], answers: Sequence[str], image: str) -> dict[str, Any]:
    scores = [task.score(text, item) for text, item in zip(answers, items, strict=True)]
    mean = sum(scores) / len(scores)
    low, high = wilson(mean, len(scores))
    row: dict[str, Any] = {
        "task": task.name, "image": image, "n": len(items), "accuracy": round(mean, 4),
        "accuracy_low": round(low, 4), "accuracy_high": round(high, 4),
    }  # fmt: skip
    kinds = sorted({item.kind for item in items})
    if len(kinds) > 1:
        row["kinds"] = {}
        for kind in kinds:
            part = [s for s, item in zip(scores, items, strict=True) if item.kind == kind]
            share = sum(part) / len(part)
            limits = [round(limit, 4) for limit in wilson(share, len(part))]
            row["kinds"][kind] = {"n": len(part), "accuracy": round(share, 4), "interval": limits}
    return row


def evaluate(
    model: Any,
    processor: Any,
    name: str,
    n: int,
    seed: int = 0,
    wrong_n: int | None = None,
    budget: int = 6000,
) -> list[dict[str, Any]]:
    """Figures of one task: a row for the right images and, for some tasks, one for wrong images.

    `n` is per kind of question for the boards' short tasks (which have four), else per task;
    `wrong_n` likewise, for wrong images (`n` if not given, 0 for none).
    """
    task = get_task(name)
    several = task.base == "board" and task.protocol != "list"
    factor = 4 if several else 1
    items = task.items(factor * n, seed)
    rows = []
    began = time.perf_counter()
    answers = answer(model, processor, items, budget)
    row = _row(task, items, answers, "right")
    row["seconds"] = round(time.perf_counter() - began, 1)
    if task.protocol == "list":
        lengths = [len(processor.tokenizer.encode(text)) for text in answers]
        row["mean_answer_tokens"] = round(sum(lengths) / len(lengths), 1)
        row["all_cells_right"] = round(sum(
            task.score(text, item) == 1.0 for text, item in zip(answers, items, strict=True)
        ) / len(items), 4)  # fmt: skip
    rows.append(row)
    wrong_n = n if wrong_n is None else wrong_n
    if name in _WITH_WRONG_IMAGE and wrong_n:
        items = task.items(factor * wrong_n, seed)
        swapped = wrong_images(items)
        rows.append(_row(task, items, answer(model, processor, swapped, budget), "wrong"))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=500, help="items per task (boards: per question)")
    parser.add_argument("--wrong-n", type=int, help="the same for wrong images; default: --n")
    parser.add_argument("--task", action="append", help="one of several tasks; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--adapter", type=Path, help="trained weights other than the package's")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    model, processor = load_embedded(
        args.dtype, args.device, cache_dir=args.cache_dir, adapter=args.adapter
    )
    rows: list[dict[str, Any]] = []
    for name in args.task or TASKS:
        for row in evaluate(model, processor, name, args.n, args.seed, args.wrong_n):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"seed": args.seed, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
