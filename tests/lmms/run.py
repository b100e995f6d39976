"""lmms-eval's own runner scores the plugin, and must say what the bench says. `make lmms`.

python -m tests.lmms.run [--model embedded] [--n 8] [--batch 4]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from conduit_kv.bench import Bench, Settings
from conduit_kv.bench.parallel import Source
from conduit_kv.plan import Plan

PLAN = "tgv-kv:0.2(of=visual, cover=0.5)"
TASKS = ("board", "haystack-2")
YAML = """
task: conduit_board
dataset_path: json
dataset_kwargs:
  data_files: {{test: {documents}}}
test_split: test
output_type: generate_until
doc_to_visual: !function board.visual
doc_to_text: !function board.text
doc_to_messages: !function board.messages
doc_to_target: !function board.target
process_results: !function board.score
generation_kwargs: {{max_new_tokens: 16, temperature: 0, num_beams: 1, do_sample: false, until: []}}
metric_list:
  - metric: right
    aggregation: mean
    higher_is_better: true
metadata:
  - version: 0.0
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.models import get_model_manifest
    from lmms_eval.tasks import TaskManager

    # Found through the entry point, by both of its names.
    assert get_model_manifest("conduit-kv").model_id == "conduit_kv"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = folder / "documents.jsonl"
        asked = [{"task": t, "number": n} for n in range(options.n) for t in TASKS]
        documents.write_text("".join(json.dumps(each) + "\n" for each in asked))
        (folder / "board.py").write_text((Path(__file__).parent / "board.py").read_text())
        (folder / "conduit_board.yaml").write_text(YAML.format(documents=documents))
        log = folder / "answers.jsonl"
        found = simple_evaluate(
            model="conduit_kv",
            model_args=f'pretrained={options.model},plan="{PLAN}",dtype=float32,log={log}',
            tasks=["conduit_board"],
            batch_size=options.batch,
            device="cpu",
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        )
        theirs = [json.loads(line) for line in log.read_text().splitlines()]
    score = found["results"]["conduit_board"]["right,none"]
    vlm = Source(options.model, "cpu", "float32").load()
    bench = Bench(vlm, Settings(TASKS, (Plan.parse(PLAN),), options.n, timed=0))
    rows = bench.run()["rows"]
    mine = sum(row["accuracy"] for row in rows) / len(rows)
    known = {
        (part.task.name, number): bench.record.get(
            part.task.name, None, item.id, str(Plan.parse(PLAN))
        )
        for part in bench._parts
        for number, item in enumerate(part.items)
    }
    differing = [
        answer
        for answer in theirs
        if known[asked[answer["document"]]["task"], asked[answer["document"]]["number"]][0].text
        != answer["text"]
    ]
    print(
        f"lmms-eval {score:.4f}, bench {mine:.4f}, {len(theirs)} answers, {len(differing)} differ"
    )
    return 0 if abs(score - mine) < 1e-9 and not differing and len(theirs) == len(asked) else 1


if __name__ == "__main__":
    sys.exit(main())
