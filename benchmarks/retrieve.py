"""Retrieval on many images: recall, answers, time, memory; against three kinds of full attention.

    python benchmarks/retrieve.py --json benchmarks/results/retrieve.json

Resumable: every answer is written as it comes, and a rerun goes on. ``--until MINUTES`` stops by
itself. Images are prefilled alone once and come from a store; what the questions cost is timed
apart. Parts: ``recall`` (ranking only), ``answers``, ``turns`` (ten questions on one set),
``time`` and ``memory``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import conduit_kv as ckv
from conduit_kv.bench.manifest import identity, machine
from conduit_kv.bench.record import write_json
from conduit_kv.bench.stats import agreement, compare, wilson
from conduit_kv.tasks import Item, get_task, messages

IMAGES = 2
"""Images' worth of tokens that a question sees."""
METHODS = (
    "retoken",
    "attention-select",
    "rekv",
    "mean-similarity",
    "uniform-frames",
    "random-select",
)
FULL = {
    "full: one prefill": "full",
    "full: entries, true positions": "uniform-frames:10000000(long=allow)",
    "full: entries, scaled positions": "uniform-frames:10000000(long=scale)",
}
TASKS = (
    "needle-16",
    "needle-32",
    "needle-64",
    "needle-64-distractors",
    "haystack-16",
    "haystack-32",
    "haystack-64",
    "multi-needle-32",
    "video-64",
)


class Enough(Exception):
    """The time asked for is up."""


@dataclass
class Log:
    """What is known, a line each; the first says what it depends on."""

    path: Path
    known: dict[str, dict[str, Any]]
    end: float | None

    @staticmethod
    def open(path: Path, depends: dict[str, Any], minutes: float | None) -> Log:
        path.parent.mkdir(parents=True, exist_ok=True)
        known: dict[str, dict[str, Any]] = {}
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
            if lines[0]["identity"] != depends:
                raise SystemExit(f"{path} was begun under other conditions: name another file")
            known = {line["key"]: line for line in lines[1:]}
        else:
            path.write_text(json.dumps({"identity": depends}) + "\n")
        return Log(path, known, time.monotonic() + 60 * minutes if minutes else None)

    def once(self, key: str, make: Any) -> dict[str, Any]:
        """What is known under a key, made now if it is not."""
        if key not in self.known:
            if self.end is not None and time.monotonic() > self.end:
                raise Enough
            self.known[key] = {"key": key, **make()}
            with self.path.open("a") as stream:
                stream.write(json.dumps(self.known[key]) + "\n")
        return self.known[key]


class Measure:
    """One model with a store of the boards' entries."""

    def __init__(self, vlm: ckv.VLM, log: Log, budget: int, memory: str) -> None:
        self.vlm, self.log, self.budget = vlm, log, budget
        self.store = ckv.Store(memory=memory)

    def inputs(self, item: Item, shown: Item | None = None) -> dict[str, Any]:
        """The processed prompt of an item, with the images of another one if named."""
        images = list((shown or item).images)
        return self.vlm.process(self.vlm.render(messages(item)), images)

    def plan(self, method: str) -> ckv.Plan:
        """A method at the budget; comparators are whole plans already."""
        return ckv.Plan.parse(FULL.get(method, f"{method}:{self.budget}"))

    def ask(
        self, task: str, item: Item, method: str, shown: Item | None = None, words: bool = True
    ) -> dict[str, Any]:
        """Ask one item under one plan."""

        def make() -> dict[str, Any]:
            plan = self.plan(method)
            store = self.store if plan.takes_entries else None
            state = self.vlm.prefill(self.inputs(item, shown), plan, store=store)
            retrieval = state.cache.retrieval
            found: dict[str, Any] = {"order": [], "text": None, "score": None}
            if retrieval is not None:
                found["order"] = list(retrieval.choice.order)[:16]
                found["choosing"] = retrieval.choice.seconds
            if words:
                (tokens,) = self.vlm.decode_together([state], item.max_new_tokens)
                text = self.vlm.tokenizer.decode(tokens, skip_special_tokens=True).strip()
                found |= {"text": text, "score": get_task(task).score(text, item)}
            return found

        control = "" if shown is None else " wrong"
        return self.log.once(f"{task} | {item.id} | {method}{control} | {self.budget}", make)


def recall(order: list[int], gold: tuple[int, ...], k: int) -> float:
    """Share of the images that hold the answer among the first ``k``, of those that can be."""
    return len(set(order[:k]) & set(gold)) / min(k, len(gold))


def fits(vlm: ckv.VLM, images: int) -> bool:
    """Whether so many images go into one prefill."""
    limit = vlm.model.config.get_text_config().max_position_embeddings
    return images * 204 + 100 < limit


def rows_of(
    measure: Measure, task: str, n: int, methods: list[str], n_full: int, n_wrong: int
) -> Iterator[dict[str, Any]]:
    """A row per method; comparators on the first ``n_full`` items, and paired differences there."""
    items = get_task(task).items(n + 1)
    results: dict[str, list[dict[str, Any]]] = {}
    images = len(items[0].sources)
    for number, item in enumerate(items[:n]):
        for method in methods:
            results.setdefault(method, []).append(measure.ask(task, item, method))
        if number < n_full:
            for method in FULL:
                if method != "full: one prefill" or fits(measure.vlm, images):
                    results.setdefault(method, []).append(measure.ask(task, item, method))
        if number < n_wrong:
            wrong = measure.ask(task, item, "retoken", items[number + 1])
            results.setdefault("retoken, wrong images", []).append(wrong)
    full = [method for method in FULL if method in results]
    means = {m: statistics.fmean(r["score"] for r in results[m]) for m in full}
    best = max(means, key=lambda m: means[m]) if means else None
    for method, found in results.items():
        scores = [result["score"] for result in found]
        low, high = wilson(statistics.fmean(scores), len(scores))
        row = {
            "task": task,
            "plan": str(measure.plan(method)) if "," not in method or method in FULL else method,
            "name": method,
            "images": images,
            "n": len(scores),
            "accuracy": statistics.fmean(scores),
            "low": low,
            "high": high,
        }
        ranked = [(r["order"], item.gold) for r, item in zip(found, items, strict=False)]
        if method in METHODS or method == "retoken":
            for k in (1, 2, 5):
                value = statistics.fmean(recall(order, gold, k) for order, gold in ranked)
                row[f"recall@{k}"] = value
                row[f"recall@{k}_interval"] = wilson(value, len(ranked))
            row["recall@1_by_kind"] = _by_kind(
                items, [recall(order, gold, 1) for order, gold in ranked]
            )
        row["by_kind"] = _by_kind(items, scores)
        if best is not None and method not in FULL and "wrong" not in method:
            theirs = [result["score"] for result in results[best]]
            row["against"] = best
            row["difference"] = vars(compare(scores[: len(theirs)], theirs))
        yield row


def _by_kind(items: list[Item], values: list[float]) -> dict[str, list[float]]:
    """Per kind of question: the mean, and of how many."""
    found: dict[str, list[float]] = {}
    for value, item in zip(values, items, strict=False):
        found.setdefault(item.kind, []).append(value)
    return {kind: [statistics.fmean(each), len(each)] for kind, each in sorted(found.items())}


def recalls_of(measure: Measure, task: str, n: int, methods: list[str]) -> Iterator[dict[str, Any]]:
    """Rankings alone, for more items than are answered."""
    items = get_task(task).items(n)
    for method in methods:
        found = [measure.ask(task + " ranked", item, method, words=False) for item in items]
        row: dict[str, Any] = {"task": task, "plan": str(measure.plan(method)), "n": n}
        for k in (1, 2, 5):
            values = [
                recall(result["order"], item.gold, k)
                for result, item in zip(found, items, strict=True)
            ]
            row[f"recall@{k}"] = statistics.fmean(values)
            row[f"recall@{k}_interval"] = wilson(statistics.fmean(values), n)
            if k == 1:
                row["recall@1_by_kind"] = _by_kind(items, values)
        yield row


def turns_of(measure: Measure, images: int, sets: int, questions: int) -> dict[str, Any]:
    """Questions one after another on one prefilled set, against each asked alone."""
    import random

    from conduit_kv.tasks.items import exact_match
    from conduit_kv.tasks.registry import _pool  # the boards of haystacks

    plan = measure.plan("retoken")
    together, alone, texts, kinds = [], [], ([], []), []
    for number in range(sets):
        rng = random.Random(f"turns {images} {number}")
        boards = rng.sample(_pool("test"), images)
        asked = _questions(rng, boards, questions)
        pictures = [board.image() for board in boards]

        def make(asked: Any = asked, pictures: Any = pictures) -> dict[str, Any]:
            content: list[dict[str, str]] = []
            for place in range(len(pictures)):
                content += [{"type": "text", "text": f"Image {place + 1}:"}, {"type": "image"}]

            def start(question: str) -> Any:
                message = {
                    "role": "user",
                    "content": [*content, {"type": "text", "text": question}],
                }
                inputs = measure.vlm.process(measure.vlm.render([message]), pictures)
                return measure.vlm.prefill(inputs, plan, store=measure.store), message

            def answer(state: Any) -> str:
                (tokens,) = measure.vlm.decode_together([state], 16)
                return str(measure.vlm.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

            singles = [answer(start(qa.question)[0]) for qa in asked]
            state, message = start(asked[0].question)
            chain = [answer(state)]
            chat = [message, _said(chain[-1])]
            for qa in asked[1:]:
                more = {"role": "user", "content": [{"type": "text", "text": qa.question}]}
                mark = "\u241e\u241e"
                text = measure.vlm.render([*chat[:-1], _said(mark), more]).rpartition(mark)[2]
                inputs = measure.vlm.process(text, first=False)
                state = measure.vlm.extend(state, inputs)
                chain.append(answer(state))
                chat += [more, _said(chain[-1])]
            return {"alone": singles, "together": chain}

        key = f"turns of all kinds {images} {number} {questions} {measure.budget}"
        found = measure.log.once(key, make)
        for qa, one, other in zip(asked, found["alone"], found["together"], strict=True):
            alone.append(exact_match(one, qa.answer))
            together.append(exact_match(other, qa.answer))
            texts[0].append(one)
            texts[1].append(other)
            kinds.append(qa.kind)
    return {
        "images": images,
        "sets": sets,
        "questions": questions,
        "n": len(alone),
        "alone": [statistics.fmean(alone), *wilson(statistics.fmean(alone), len(alone))],
        "together": [statistics.fmean(together), *wilson(statistics.fmean(together), len(alone))],
        "difference": vars(compare(together, alone)),
        "agreement": agreement(texts[1], texts[0]),
        "by_kind": {
            kind: {
                "n": kinds.count(kind),
                "alone": statistics.fmean(
                    a for a, k in zip(alone, kinds, strict=True) if k == kind
                ),
                "together": statistics.fmean(
                    t for t, k in zip(together, kinds, strict=True) if k == kind
                ),
            }
            for kind in sorted(set(kinds))
        },
    }


def _questions(rng: Any, boards: Any, count: int) -> list[Any]:
    """Questions of all kinds, each about another board, and a picture that no other one shows."""
    from conduit_kv.tasks import questions as ask

    names = [picture.name for board in boards for picture in board.pictures]
    found: list[Any] = []
    for board in rng.sample(list(boards), len(boards)):
        alone = [picture for picture in board.pictures if names.count(picture.name) == 1]
        if not alone or len(found) == count:
            continue
        picture = rng.choice(alone)
        kind = ("where", "left-of", "which-image")[len(found) % 3]
        if kind == "which-image":
            found.append(ask.which_image(picture, boards))
        else:
            found.append(ask.where(picture) if kind == "where" else ask.left_of(picture, board))
    return found


def _said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def times_of(measure: Measure, images: int, repeats: int) -> dict[str, Any]:
    """Seconds per question after prefill, and those of full attention on the same path."""
    vlm = measure.vlm
    item, other = get_task(f"needle-{images}").items(2)
    more = vlm.process(
        vlm.render([{"role": "user", "content": [{"type": "text", "text": other.question}]}]),
        first=False,
    )

    def make() -> dict[str, Any]:
        found: dict[str, Any] = {}
        inputs = measure.inputs(item)
        for method in ("retoken", "attention-select", "full: entries, true positions"):
            state = vlm.prefill(inputs, measure.plan(method), store=measure.store)
            seconds = []
            for _ in range(repeats + 1):
                fork = type(state)(state.cache.fork(), state.logits, list(state.ids))
                seconds.append(vlm.extend(fork, more).seconds["first_token"])
            found[method] = statistics.median(seconds[1:])
        if fits(vlm, images):
            seconds = [vlm.prefill(inputs, "full").seconds for _ in range(repeats + 1)]
            found["full: one prefill, from processed inputs"] = statistics.median(
                s["first_token"] for s in seconds[1:]
            )
        return {"seconds": found}

    seconds = measure.log.once(f"time {images} {repeats} {measure.budget}", make)["seconds"]
    mine = seconds["retoken"]
    return {
        "images": images,
        "repeats": repeats,
        "seconds": seconds,
        "share_of": {name: mine / value for name, value in seconds.items() if name != "retoken"},
    }


def memory_of(measure: Measure, images: int) -> dict[str, Any]:
    """Bytes resident in a request whose entries lie on disk, against the whole cache."""
    item = get_task(f"needle-{images}").items(1)[0]

    def make() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            store = ckv.Store(folder, memory=0)
            state = measure.vlm.prefill(measure.inputs(item), measure.plan("retoken"), store=store)
            report = state.report
            return {
                "by_kind": report.bytes_by_kind,
                "resident": report.kv_allocated_bytes,
                "full": report.full_bytes,
            }

    found = measure.log.once(f"memory {images} {measure.budget}", make)
    return {"images": images, **found, "share": found["resident"] / found["full"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--n-full", type=int, default=60, help="items for the comparators")
    parser.add_argument("--n-wrong", type=int, default=60, help="items with wrong images")
    parser.add_argument("--n-recall", type=int, default=0, help="items that are only ranked")
    parser.add_argument("--task", action="append", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--method", action="append", choices=METHODS)
    parser.add_argument("--part", action="append", choices=("answers", "recall", "turns", "time",
                                                            "memory"))  # fmt: skip
    parser.add_argument("--memory", default="3GB", help="for entries")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--until", type=float, help="stop after so many minutes")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    vlm = ckv.load("embedded", device="cpu", dtype=options.dtype)
    log_path = options.json.with_suffix(".items.jsonl")
    log = Log.open(log_path, identity(vlm, 0), options.until)
    tokens = IMAGES * 196
    measure = Measure(vlm, log, tokens, options.memory)
    parts = options.part or ["answers", "turns", "time", "memory"]
    methods = options.method or list(METHODS)
    results: dict[str, Any] = {
        "manifest": {**identity(vlm, 0), "machine": machine(vlm), "budget": tokens},
        "answers": [], "recall": [], "turns": [], "time": [], "memory": [],
    }  # fmt: skip
    try:
        for task in options.task or TASKS:
            if "recall" in parts:
                results["recall"] += recalls_of(measure, task, options.n_recall, methods)
            if "answers" in parts:
                results["answers"] += rows_of(
                    measure, task, options.n, methods, options.n_full, options.n_wrong
                )
        if "turns" in parts:
            results["turns"] = [turns_of(measure, 16, 25, 10)]
        if "time" in parts:
            results["time"] = [times_of(measure, images, options.repeats) for images in (32, 64)]
        if "memory" in parts:
            results["memory"] = [memory_of(measure, 64)]
    except Enough:
        results["manifest"]["complete"] = False
    write_json(options.json, results)
    for part in ("answers", "recall", "turns", "time", "memory"):
        for row in results[part]:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
