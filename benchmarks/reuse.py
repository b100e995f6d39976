"""What reuse costs in accuracy and gains in time, on the embedded model.

    python benchmarks/reuse.py --json benchmarks/results/reuse.json [--n 300] [--until MINUTES]

Accuracy: boards that were cached in other prompts (shuffled, with other text) are asked about under
every selector, beside the full prefill of the same prompt, and, as a control, beside the full
prefill with another item's images. ``kl`` is the divergence of the first answer token's
distribution from that of the full prefill, in nats; ``kl_answer`` the same over all tokens of the
full prefill's answer, mean, since many answers begin alike. Speed: the first token of a prompt
with 16 images. Resumable: Ctrl-C keeps the items done, and a rerun goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import MofNCompleteColumn, Progress

import conduit_kv as ckv
from conduit_kv.bench.stats import compare, wilson
from conduit_kv.engine.runner import State
from conduit_kv.tasks import Item, get_task, messages

TASK = "reuse"
SHARES = ("0.05", "0.1", "0.2")
SELECTORS = ("conduit", "prophetkv", "cacheblend", "kvshare", "first-refresh", "random-refresh")
PLANS = (
    *(f"{name}:{share}" for share in SHARES for name in SELECTORS),
    "reuse-all",
    "conduit:0.1(refresh_text=true)",
    "conduit:0.1(context=none)",
    "reuse-all(context=none)",
)
FULL, WRONG = "full", "full, another item's images"
IMAGES = 16


def prompt(vlm: ckv.VLM, item: Item, images: Sequence[Any] | None = None) -> dict[str, Any]:
    return vlm.process(vlm.render(messages(item)), list(images or item.images))


def warm(vlm: ckv.VLM, item: Item, store: ckv.Store, context: str) -> None:
    """Bring an item's images into the store, by another prompt with them in another order."""
    images = list(item.images)
    random.Random(item.id).shuffle(images)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": "What do you see?"}]
    text = vlm.render([{"role": "user", "content": content}])
    vlm.prefill(vlm.process(text, images), f"reuse-all(context={context})", store=store)


def divergence(true: torch.Tensor, other: torch.Tensor) -> float:
    """Kullback-Leibler divergence in nats, from log-probabilities."""
    return float((true.exp() * (true - other)).sum())


def ask(vlm: ckv.VLM, item: Item, other: Item, store: ckv.Store) -> dict[str, dict[str, Any]]:
    """Answers to one item under every plan."""
    for context in ("template", "none"):
        warm(vlm, item, store, context)
    inputs = prompt(vlm, item)
    states = {FULL: vlm.prefill(inputs), WRONG: vlm.prefill(prompt(vlm, item, other.images))}
    for plan in PLANS:
        states[plan] = vlm.prefill(inputs, plan, store=store)
    logs = {plan: state.logits[0].float().log_softmax(-1) for plan, state in states.items()}
    forced = {
        plan: State(state.cache.fork(), state.logits, list(state.ids))
        for plan, state in states.items()
    }
    tokens = vlm.decode_together(list(states.values()), item.max_new_tokens)
    task, full = get_task(TASK), logs[FULL]
    along = {plan: [divergence(full, logs[plan])] for plan in states}
    for token in tokens[0][: item.max_new_tokens - 1]:
        vlm.step(list(forced.values()), [token] * len(forced))
        now = {plan: state.logits[0].float().log_softmax(-1) for plan, state in forced.items()}
        for plan in states:
            along[plan].append(divergence(now[FULL], now[plan]))
    found = {}
    for (plan, state), answer in zip(states.items(), tokens, strict=True):
        text = str(vlm.tokenizer.decode(answer, skip_special_tokens=True)).strip()
        usage = state.report.usage
        found[plan] = {
            "text": text,
            "score": task.score(text, item),
            "kl": along[plan][0],
            "kl_answer": statistics.fmean(along[plan]),
            "cached": usage["cached_tokens"],
            "refreshed": usage["refreshed_tokens"],
            "images": usage["image_tokens"],
        }
    return found


def rows(done: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row per plan."""
    items = list(done.values())
    made = []
    for plan in (FULL, WRONG, *PLANS):
        mine = [item[plan] for item in items if plan in item]
        if not mine:
            continue
        scores = [entry["score"] for entry in mine]
        full = [item[FULL]["score"] for item in items if plan in item]
        mean = statistics.fmean(scores)
        low, high = wilson(mean, len(mine))
        row = {
            "task": TASK,
            "plan": plan,
            "n": len(mine),
            "accuracy": mean,
            "accuracy_low": low,
            "accuracy_high": high,
            "of_full": mean / statistics.fmean(full) if sum(full) else None,
            "agreement": statistics.fmean(
                a["text"].casefold() == item[FULL]["text"].casefold()
                for a, item in zip(mine, items, strict=True)
            ),
            "kl": statistics.fmean(entry["kl"] for entry in mine),
            "kl_answer": statistics.fmean(entry["kl_answer"] for entry in mine),
            "refreshed": statistics.fmean(entry["refreshed"] for entry in mine),
            "image_tokens": statistics.fmean(entry["images"] for entry in mine),
            "vs_full": vars(compare(scores, full)),
        }
        share = plan.partition(":")[2].partition("(")[0]
        against = f"conduit:{share}"
        if share and plan != against and all(against in item for item in items):
            theirs = [item[against] for item in items]
            row["vs_conduit"] = vars(compare(scores, [entry["score"] for entry in theirs], full))
            pairs = zip(mine, theirs, strict=True)
            more = [a["kl_answer"] - b["kl_answer"] for a, b in pairs]
            row["kl_answer_minus_conduit"] = statistics.fmean(more)
            if len(more) > 1:
                row["kl_answer_minus_conduit_se"] = statistics.stdev(more) / len(more) ** 0.5
        made.append(row)
    return made


def speed(vlm: ckv.VLM, repeats: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt with 16 images, in turn, medians."""
    item = get_task(f"haystack-{IMAGES}").items(1)[0]
    inputs = prompt(vlm, item)
    folder = tempfile.TemporaryDirectory()
    store = ckv.Store(folder.name)
    plan = ckv.Plan.parse("conduit:0.1")
    report = vlm.prefill(inputs, plan, store=store).report  # the miss
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        state = vlm.prefill(inputs)
        full = state.seconds
        found.setdefault("full, from pixels", []).append(full["first_token"])
        found.setdefault("full, from cached encoder outputs", []).append(
            full["first_token"] - full["encode"]
        )
        for name, source in (("memory", store), ("disk", ckv.Store(folder.name))):
            state = vlm.prefill(inputs, plan, store=source)
            found.setdefault(f"conduit:0.1, from {name}", []).append(state.seconds["first_token"])
            report = state.report
    folder.cleanup()
    medians = {name: statistics.median(values) for name, values in found.items()}
    work = report.work
    if work is None:
        raise RuntimeError("the report of a hit counts no FLOPs")
    return {
        "images": IMAGES,
        "tokens": report.sequences[0].tokens,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "dtype": str(vlm.model.dtype),
        "seconds": medians,
        "all_seconds": found,
        "flops_share": work.prefill.total / work.full_prefill.total,
        "faster_than_from_pixels": {
            name: medians["full, from pixels"] / value for name, value in medians.items()
        },
        "faster_than_from_encoder_outputs": {
            name: medians["full, from cached encoder outputs"] / value
            for name, value in medians.items()
        },
    }


def accuracy(
    vlm: ckv.VLM, n: int, file: Path, until: float | None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Ask the items that have not been asked yet."""
    done: dict[str, dict[str, dict[str, Any]]] = {}
    if file.exists():
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            done[entry["item"]] = entry["plans"]
    items = get_task(TASK).items(n + 1)
    store = ckv.Store(memory="4GB")
    end = None if until is None else time.monotonic() + 60 * until
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as bars:
        for number in bars.track(range(n), description=TASK):
            if items[number].id in done:
                continue
            if end is not None and time.monotonic() > end:
                break
            plans = ask(vlm, items[number], items[number + 1], store)
            done[items[number].id] = plans
            with file.open("a") as out:
                out.write(json.dumps({"item": items[number].id, "plans": plans}) + "\n")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--until", type=float, help="stop asking after so many minutes")
    parser.add_argument("--part", choices=("accuracy", "speed", "both"), default="both")
    options = parser.parse_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(options.json.read_text()) if options.json.exists() else {}

    def write() -> None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")

    vlm = ckv.load("embedded", device="cpu")
    found["model"], found["dtype"] = vlm.name, str(vlm.model.dtype)
    if options.part != "speed":
        lines = options.json.with_suffix(".jsonl")
        found["rows"] = rows(accuracy(vlm, options.n, lines, options.until))
        write()
    if options.part != "accuracy":
        found["speed"] = []
        for dtype in ("float32", "bfloat16"):
            timed = ckv.load("embedded", device="cpu", dtype=dtype)
            found["speed"].append(speed(timed, options.repeats))
            write()


if __name__ == "__main__":
    main()
