"""A model that worker processes of tests load, or die over."""

import os
from dataclasses import dataclass

from conduit_kv.bench.parallel import Source
from conduit_kv.engine.vlm import VLM


@dataclass(frozen=True)
class Tiny(Source):
    """A tiny model from a folder; ``dies`` names a file: its worker ends where there is none."""

    dies: str = ""

    def load(self) -> VLM:
        if self.dies and not os.path.exists(self.dies):
            os._exit(1)
        return super().load()
