"""A model that worker processes of tests can load: they begin without tests/conftest.py."""

from tests.tiny import torchvision_shim

torchvision_shim.install()

import os  # noqa: E402
from dataclasses import dataclass  # noqa: E402

from conduit_kv.bench.parallel import Source  # noqa: E402
from conduit_kv.engine.vlm import VLM  # noqa: E402


@dataclass(frozen=True)
class Tiny(Source):
    """A tiny model from a folder; ``dies`` names a file: its worker ends where there is none."""

    dies: str = ""

    def load(self) -> VLM:
        if self.dies and not os.path.exists(self.dies):
            os._exit(1)
        return super().load()
