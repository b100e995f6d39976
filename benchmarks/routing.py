"""What leaving visual tokens out of layers costs in accuracy and saves in time.

    python benchmarks/routing.py --json benchmarks/results/routing.json

On boards, questions by kind: every ranking that deletes and that reroutes, at three reductions,
controls at the same schedules, LightKV and ToMe beside them; the right image and a wrong one. Then
the prefill of sixteen images at half of the FLOPs. Resumable: Ctrl-C keeps the items done, and a
rerun goes on. ``--until MINUTES`` stops by itself, ``--time`` measures the prefill alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import conduit_kv as ckv
from conduit_kv.bench.protocols import answer, prompt_of
from conduit_kv.bench.stats import compare, wilson
from conduit_kv.plan import Plan
from conduit_kv.tasks import get_task

REDUCTIONS = {"66.7 %": 0.333, "77.8 %": 0.222, "88.9 %": 0.111}
RANKS = ("fastv", "pdrop", "nuwa")


def routes(keep: float) -> dict[str, str]:
    """Plans at a mean of ``keep`` of the visual tokens, by what they are."""
    # Nuwa decides at half depth: beyond half of the tokens its first stage does the rest.
    found = {}
    for action in ("delete", "reroute"):
        for rank in RANKS:
            if rank == "nuwa":
                first = 1.5 * keep
                rest = f"nuwa-reduce:{first:.4f} + "
                found[f"{rank} {action}"] = f"{rest}{action}:{keep / first:.4f}(rank=nuwa)"
            else:
                found[f"{rank} {action}"] = f"{action}:{keep}(rank={rank})"
        found[f"random {action}"] = f"{action}:{keep}(rank=random)"
        found[f"random {action}, fastv's schedule"] = (
            f"{action}:{keep}(rank=random, schedule_of=fastv)"
        )
    return found


MERGES = {
    "lightkv": "lightkv:0.55",
    "lightkv, own positions": "lightkv:0.55(positions=keep)",
    "tome": "tome:0.55",
    "fastv delete": "fastv:0.55",
    "fastv reroute": "reroute:0.55(rank=fastv)",
    "pdrop reroute": "reroute:0.55",
    "random-reduce": "random-reduce:0.55",
    "uniform-reduce": "uniform-reduce:0.55",
    "visionzip": "visionzip:0.55",
    "divprune": "divprune:0.55",
    "cdpruner": "cdpruner:0.55",
    "nuwa-reduce": "nuwa-reduce:0.55",
}


def everything() -> dict[str, tuple[str, str]]:
    """Name to (group, plan)."""
    plans = {"full": ("full", "full")}
    for reduction, keep in REDUCTIONS.items():
        for name, plan in routes(keep).items():
            plans[f"{name} {reduction}"] = (reduction, plan)
    for name, plan in MERGES.items():
        plans[f"{name} 55 % kept"] = ("55 % kept", plan)
    return plans


class Results:
    """Answers by plan and item, written after each item."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"answers": {}, "wrong_image": {}, "kinds": {}, "prefill": {}}
        if path.exists():
            self.data |= json.loads(path.read_text())

    def save(self) -> None:
        self.data["summary"] = summary(self.data)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.data, indent=1))
        temporary.replace(self.path)


def run(
    vlm: Any,
    results: Results,
    n: int,
    wrong: int,
    kinds: tuple[str, ...],
    groups: tuple[str, ...],
    end: float | None,
) -> None:
    """Answer the items of some kinds under the plans of some groups, until the time is up."""
    task = get_task("board")
    items = [item for item in task.items(n) if item.kind in kinds]
    plans = {name: (group, text) for name, (group, text) in everything().items()
             if group in groups or group == "full"}  # fmt: skip
    saved = time.monotonic()
    for number, item in enumerate(items):
        results.data["kinds"][item.id] = item.kind
        for where, images in (("answers", None), ("wrong_image", items[number - 1])):
            if images is not None and number >= wrong:
                continue
            done = results.data[where]
            missing = [name for name in plans if item.id not in done.get(name, {})]
            if not missing:
                continue
            shown = None if images is None else list(images.images)
            prompt = prompt_of(vlm, item, task.protocol, shown)
            # Each plan has its own prefill; their answers are decoded as one batch.
            outcomes = answer(vlm, prompt, [Plan.parse(plans[name][1]) for name in missing])
            for name, outcome in zip(missing, outcomes, strict=True):
                done.setdefault(name, {})[item.id] = task.score(outcome.text, item)
        if time.monotonic() - saved > 60:
            results.save()
            saved = time.monotonic()
        if end is not None and time.monotonic() > end:
            break
    results.save()


def summary(data: Mapping[str, Any]) -> dict[str, Any]:
    """Per plan and kind of question: n, accuracy with Wilson's interval, paired differences."""
    found: dict[str, Any] = {}
    plans = everything()
    full = data["answers"].get("full", {})
    for name, scores in data["answers"].items():
        if name not in plans:
            continue
        group, plan = plans[name]
        row: dict[str, Any] = {"plan": plan, "kinds": {}}
        kinds = sorted({data["kinds"][item] for item in scores})
        groups = {"all": kinds, "what+where": ["what", "where"], "others": ["how-many", "left-of"]}
        for kind in [*groups, *kinds]:
            wanted = groups.get(kind, [kind])
            items = [i for i in scores if data["kinds"][i] in wanted and i in full]
            if not items:
                continue
            mine, whole = [scores[i] for i in items], [full[i] for i in items]
            mean = sum(mine) / len(mine)
            entry: dict[str, Any] = {
                "n": len(items),
                "accuracy": mean,
                "interval": wilson(mean, len(items)),
                "full": sum(whole) / len(whole),
                "against_full": vars(compare(mine, whole, whole)),
            }
            other = partner(name, group)
            theirs = data["answers"].get(other, {}) if other else {}
            if other and all(i in theirs for i in items):
                entry["against"] = other
                entry["difference"] = vars(compare(mine, [theirs[i] for i in items], whole))
            row["kinds"][kind] = entry
        wrong = data["wrong_image"].get(name, {})
        if wrong:
            mean = sum(wrong.values()) / len(wrong)
            row["wrong_image"] = {
                "n": len(wrong), "accuracy": mean, "interval": wilson(mean, len(wrong))
            }  # fmt: skip
        found[name] = row
    return found


def partner(name: str, group: str) -> str | None:
    """What a plan is to be compared with besides the full cache."""
    if "reroute" in name and group != "55 % kept":
        return name.replace("reroute", "delete")
    if name.startswith("lightkv"):
        return "tome 55 % kept"
    if group == "55 % kept" and not name.startswith("random"):
        return "random-reduce 55 % kept"
    return None


def prefill(vlm: Any, repeats: int = 5) -> dict[str, Any]:
    """Seconds of the text stack over sixteen images, in turn, so that all see the same machine."""
    task = get_task("haystack-16")
    prompt = prompt_of(vlm, task.items(1)[0], task.protocol)
    plans = {
        "full": "full",
        "fastv flops=0.5": "fastv(flops=0.5)",
        "pdrop flops=0.5": "pdrop(flops=0.5)",
        "reroute flops=0.5": "reroute(flops=0.5)",
        "reroute fastv flops=0.5": "reroute(rank=fastv, flops=0.5)",
    }
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    work: dict[str, Any] = {}
    for turn in range(repeats + 1):
        for name, plan in plans.items():
            state = vlm.prefill(prompt.head, plan)
            if turn:  # the first one warms up
                spent = state.seconds["first_token"] - state.seconds["encode"]
                seconds[name].append(spent)
            work[name] = state.report.work
    full = min(seconds["full"])
    return {
        "tokens": int(prompt.head["input_ids"].shape[1]),
        "threads": torch.get_num_threads(),
        "dtype": str(vlm.model.dtype),
        "plans": {
            name: {
                "plan": plans[name],
                "seconds": times,
                "best": min(times),
                "of_full": min(times) / full,
                "flops_of_full": work[name].prefill.total / work[name].full_prefill.total,
                "ranking_of_full": work[name].prefill.ranking / work[name].full_prefill.total,
            }
            for name, times in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--n", type=int, default=600, help="items; half are what and where")
    parser.add_argument("--wrong", type=int, default=40, help="items also with a wrong image")
    parser.add_argument(
        "--kinds", default="what,where", help="of questions, or with how-many,left-of"
    )
    parser.add_argument("--groups", default="66.7 %,77.8 %,88.9 %,55 % kept", help="of plans")
    parser.add_argument("--until", type=float, help="stop after so many minutes")
    parser.add_argument("--time", action="store_true", help="measure the prefill alone")
    options = parser.parse_args()
    vlm = ckv.load("embedded", device="cpu")
    results = Results(options.json)
    if options.time:
        results.data["prefill"] = prefill(vlm)
        results.save()
        print(json.dumps(results.data["prefill"], indent=1))
        return
    end = time.monotonic() + 60 * options.until if options.until else None
    kinds, groups = tuple(options.kinds.split(",")), tuple(options.groups.split(","))
    run(vlm, results, options.n, options.wrong, kinds, groups, end)
    for name, row in results.data["summary"].items():
        print(
            f"{name:40}",
            "  ".join(
                f"{kind} {entry['accuracy']:.2f} (n={entry['n']})"
                for kind, entry in row["kinds"].items()
            ),
            f"wrong image {row.get('wrong_image', {}).get('accuracy', float('nan')):.2f}",
        )


if __name__ == "__main__":
    main()
