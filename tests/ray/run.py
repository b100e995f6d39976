"""A run on a local Ray cluster gives the rows of this process, although an actor dies. `make ray`.

python -m tests.ray.run [--n 6]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from conduit_kv.bench import Bench, Settings
from conduit_kv.bench.parallel import Source
from conduit_kv.bench.run import Answers, Unit
from conduit_kv.integrations.ray import RayCluster
from conduit_kv.plan import Plan


class Dying(Bench):
    """Ends its process in the middle of the run, once."""

    mark: Path

    def answer(self, unit: Unit) -> Answers:
        if unit.number == 2 and not self.mark.exists():
            self.mark.touch()
            os._exit(1)
        return super().answer(unit)


@dataclass(frozen=True)
class DyingSource(Source):
    mark: str = ""

    def bench(self, settings: Settings) -> Bench:
        bench = Dying(self.load(), settings)
        bench.mark = Path(self.mark)
        return bench


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=6)
    options = parser.parse_args()
    settings = Settings(
        ("board-late",), (Plan.of("full"), Plan.of("tgv-kv:0.2")), options.n, timed=0
    )
    with tempfile.TemporaryDirectory() as folder:
        source = DyingSource("embedded", "cpu", "float32", 1, mark=str(Path(folder) / "died"))
        vlm = Source("embedded", "cpu", "float32", 1).load()
        alone = Bench(vlm, settings).run()["rows"]
        cluster = RayCluster(source, settings, 1, "local")
        found = Bench(vlm, settings, Path(folder) / "out.json").run(crew=cluster)["rows"]
        died = Path(source.mark).exists()
    print(f"{len(found)} rows, equal: {found == alone}, an actor died: {died}")
    return 0 if found == alone and died else 1


if __name__ == "__main__":
    sys.exit(main())
