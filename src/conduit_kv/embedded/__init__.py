"""A small vision-language model that needs no hub: its parts come from package registries.

SmolLM2-135M-Instruct, EfficientNet-Lite0 and an adapter trained here are put together once into a
standard ``LlavaForConditionalGeneration``. Importing this package registers its vision tower with
Transformers' auto classes.
"""

from conduit_kv.embedded.build import ensure_built, load_embedded
from conduit_kv.embedded.parts import Parts, check_parts, install_parts
from conduit_kv.embedded.tower import ConduitCnnConfig, ConduitCnnModel

__all__ = [
    "ConduitCnnConfig",
    "ConduitCnnModel",
    "Parts",
    "check_parts",
    "ensure_built",
    "install_parts",
    "load_embedded",
]
