"""KVCapsule: some keys and a few coefficients of values per block of visual tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from conduit_kv.cache.capsule import BlockParts, Capsule
from conduit_kv.cache.packed import Store
from conduit_kv.errors import PlanError
from conduit_kv.methods.base import Method, register
from conduit_kv.methods.hold.base import FULL_BITS, HoldMethod, Scene, Where

if TYPE_CHECKING:
    from conduit_kv.artefact import Artefact
    from conduit_kv.capsule import Moments

SHIPPED = Path(__file__).parents[2] / "embedded" / "kvcapsule.safetensors"
"""The built-in model's artefact."""


@dataclass(frozen=True)
class Blocks(HoldMethod):
    """Base of the methods that compress along the tokens of a block.

    Parameters
    ----------
    keep : float
        Share of the numbers of visual K and V that is kept, mean over layers; 1.0 is the identity.
    rebuild : {"step", "once"}
        Rebuild keys at every step, or once, which takes the room of all keys.
    """

    budget_field: ClassVar[str] = "keep"
    budget_hint: ClassVar[str] = "write {name}:0.4 to keep 40 % of the numbers"
    packs: ClassVar[type[Capsule]] = Capsule

    keep: float = 1.0
    rebuild: Literal["step", "once"] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.keep <= 1:
            raise PlanError(f"{self.name}: keep={self.keep:g} is not a share in (0, 1]")

    @property
    def is_identity(self) -> bool:
        return self.keep == 1.0

    def check_beside(self, others: Sequence[Method]) -> None:
        if self.is_identity:
            return
        for other in others:
            if other.stage in ("reduce", "route", "evict") and not other.is_identity:
                raise PlanError(
                    f"{self.name} needs whole blocks of neighbouring visual tokens, and "
                    f"{other.name} takes tokens out of them: leave one of the two out"
                )

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens in a block."""

    def bits_of(self, scene: Scene, tokens: Tensor) -> Tensor:
        """0 for the whole blocks of each image; what is left of an image stays as it is."""
        bits = torch.full_like(tokens, FULL_BITS)
        images = scene.layout.image[tokens]
        for image in images[images >= 0].unique().tolist():
            mine = torch.nonzero(images == image).flatten()
            bits[mine[: len(mine) // self.block_size * self.block_size]] = 0
        return bits

    def store(self, keys: Tensor, values: Tensor, bits: int, where: Where) -> Store:
        cos, sin = where.rotary(where.tokens)
        parts = self.parts(where, keys).to(keys.device).heads(where.first, len(keys))
        once = self.rebuild == "once"
        return Capsule.of(keys.contiguous(), values.contiguous(), cos, sin, parts, once)

    def restore(
        self, state: dict[str, Tensor], bits: int, widths: tuple[int, int], where: Where
    ) -> Store:
        keys = state["keys"]
        shape = keys.new_empty((len(keys), 0, widths[0]))
        parts = self.parts(where, shape).to(keys.device).heads(where.first, len(keys))
        cos, sin = where.rotary(where.tokens)
        return self.packs(keys, state["values"], cos, sin, parts, self.rebuild == "once")

    @abstractmethod
    def parts(self, where: Where, keys: Tensor) -> BlockParts:
        """What the layer's blocks have in common, for all KV heads."""


_fitted: dict[tuple[int, float, str], list[BlockParts]] = {}


@register
@dataclass(frozen=True)
class KvCapsule(Blocks):
    r"""Keys: a subset that predicts the others; values: principal components over the tokens.

    A block is ``g`` consecutive visual tokens (two rows of the built-in model's grid). Per layer:

    - keys, before RoPE: the ``m`` tokens of a block from which the others follow best are kept
      exactly, chosen greedily on calibration images; the others are rebuilt by the best linear
      prediction, :math:`\hat K = \mu + M (K_{kept} - \mu_{kept})`, in which a channel weighs as
      much as the queries make of it, and are turned to their positions;
    - values: :math:`C = U^\top (V - \mu)` with the ``r`` leading directions ``U`` of the covariance
      over the tokens; attended without being rebuilt;
    - ``m`` and ``r`` differ between layers, and lie where they lower the relative error most, under
      one budget.

    The paper rebuilds keys with a small MLP. Here the prediction is linear: it has a closed form,
    serves every share with one artefact, and is cheap enough to be made at each step.

    Parameters
    ----------
    artefact : str
        A file from ``conduit-kv fit kvcapsule``; the built-in model's own if empty.
    """

    name: ClassVar[str] = "kvcapsule"
    paper: ClassVar[str] = "https://arxiv.org/abs/2605.16439"
    basis: ClassVar[str] = "reconstructed"

    artefact: str = ""

    def load(self) -> Artefact:
        """Its artefact.

        Raises
        ------
        PlanError
            If none is named and none is shipped.
        """
        from conduit_kv.artefact import load_artefact

        if not self.artefact and not SHIPPED.is_file():
            raise PlanError(
                f"{self.name} needs an artefact: fit one with conduit-kv fit kvcapsule, and name "
                "it as artefact=FILE"
            )
        return load_artefact(self.artefact or SHIPPED)

    def moments(self) -> Moments:
        """What its artefact holds."""
        from conduit_kv.capsule import Moments

        return Moments.of(self.load())

    @property
    def block_size(self) -> int:
        return self.moments().block

    def check_model(self, text_model: nn.Module) -> None:
        from conduit_kv.capsule.moments import KIND

        if not self.is_identity:
            self.load().check(KIND, text_model, self.artefact or "the artefact")

    def parts(self, where: Where, keys: Tensor) -> BlockParts:
        artefact = self.load()
        key = (id(artefact), self.keep, self.name)
        if key not in _fitted:
            _fitted[key] = self.fitted(self.moments())
        return _fitted[key][where.layer]

    def fitted(self, moments: Moments) -> list[BlockParts]:
        """Per layer."""
        return moments.parts(self.keep)
