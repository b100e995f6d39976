"""Before any test imports Transformers: torchvision must be importable (see the shim)."""

from tests.tiny import torchvision_shim

torchvision_shim.install()
