"""WindowQuant: visual windows that resemble the question keep more bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from conduit_kv.cache.codec import BITS
from conduit_kv.cache.packed import Quantised, Store
from conduit_kv.errors import PlanError
from conduit_kv.layout import Layout
from conduit_kv.methods.base import register
from conduit_kv.methods.hold.base import FULL_BITS, HoldMethod, Scene, Where

_MOST_FULL = 0.05
"""With ``avg_bits``, the largest share of windows in full precision."""


@register
@dataclass(frozen=True)
class WindowQuant(HoldMethod):
    r"""Mixed precision per visual window, by similarity to the question.

    A window is a row of an image's grid, a frame of a video, or a number of tokens. Its similarity

    .. math:: s_w = \cos\bigl(\tfrac1{|w|}\sum_{i \in w} e_i,\; t\bigr)

    is that of its mean embedding ``e`` (projected visual tokens, in the model's input space) to the
    text of the turn that brought it: its mean embedding, or with ``similarity="max"`` the largest
    cosine over its tokens. Bits follow from thresholds between the smallest and the largest ``s``,

    .. math::
        b_w = \begin{cases}
            b_{low}  & s_w < s_{min} + \alpha (s_{max} - s_{min}) \\
            b_{high} & s_w > s_{max} - \beta (s_{max} - s_{min}) \\
            b_{mid}  & \text{otherwise}
        \end{cases}

    or from ``avg_bits``: at most 5 % of the windows, the most similar ones, at ``b_high``, fewer if
    ``avg_bits`` asks for it; then as many at ``b_mid`` as fit; the others at ``b_low``. The average
    counts payload bits over the visual tokens that the layer holds, without scales and zeros.

    The windows of one bit-width lie together, K and V in the same order: softmax sums over tokens
    in any order. K is packed after RoPE, per channel in groups of 32 tokens, V per token.

    A later turn finds its predecessor's windows as they are: the search belongs to the first
    question. With ``research=True`` the full-precision keys and values are kept beside the packed
    ones and packed anew for each question, which costs their bytes; the report says how many.

    Parameters
    ----------
    avg_bits : float or None
        Largest average; None for the thresholds.
    window : {"auto", "row", "frame"} or int
        ``"auto"``: frames of a video, rows of an image.
    alpha, beta : float
    bits : tuple of int
        ``(low, mid, high)``.
    similarity : {"mean", "max"}
    tolerance : float
        Outlier guard: a layer whose attention output for the prompt's last rows changes by more
        than this (relative, L2) keeps one level more. 0 leaves it out.
    research : bool
    """

    name: ClassVar[str] = "windowquant"
    paper: ClassVar[str] = "https://arxiv.org/abs/2605.02262"
    basis: ClassVar[str] = "reconstructed"
    searches: ClassVar[bool] = True
    budget_field: ClassVar[str] = "avg_bits"
    budget_hint: ClassVar[str] = "write {name}:3.17 for an average of 3.17 bits"

    avg_bits: float | None = None
    window: Literal["auto", "row", "frame"] | int = "auto"
    alpha: float = 0.6
    beta: float = 0.1
    bits: tuple[int, ...] = (2, 4, 16)
    similarity: Literal["mean", "max"] = "mean"
    tolerance: float = 0.5
    research: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        low, *_, high = self.bits or (0, 0)
        if len(self.bits) != 3 or list(self.bits) != sorted(self.bits):
            raise PlanError(f"{self.name}: bits={self.bits} are not (low, mid, high), ascending")
        if any(bits not in (*BITS, FULL_BITS) for bits in self.bits):
            known = ", ".join(map(str, BITS))
            raise PlanError(f"{self.name}: bits={self.bits} cannot be packed: take {known} or 16")
        if self.avg_bits is not None and not low <= self.avg_bits <= FULL_BITS:
            raise PlanError(
                f"{self.name}: no average of {self.avg_bits:g} bits with bits={self.bits}: "
                f"take {low} to {high}, or 16 for full precision"
            )
        if isinstance(self.window, int):
            if self.window < 1:
                raise PlanError(f"{self.name}: window={self.window} is not a number of tokens")
        elif self.window not in ("auto", "row", "frame"):
            raise PlanError(f"{self.name}: window={self.window}: take auto, row, frame or a number")
        if not (0 <= self.alpha <= 1 and 0 <= self.beta <= 1 and self.tolerance >= 0):
            raise PlanError(f"{self.name}: alpha and beta lie in [0, 1], tolerance is not negative")

    @property
    def is_identity(self) -> bool:
        return self.avg_bits == FULL_BITS

    @property
    def guard(self) -> float:
        return self.tolerance

    def more(self, bits: Tensor) -> Tensor:
        more = bits.clone()
        for level, above in zip((*BITS, FULL_BITS), (4, 4, 8, FULL_BITS, FULL_BITS), strict=True):
            more[bits == level] = above
        return more

    def windows(self, layout: Layout) -> Tensor:
        """``[T]`` int64, each token's window, counted over the sequence; -1 for text.

        Windows of later images come after those of earlier ones, so that they keep their numbers
        when a sequence grows.
        """
        visual = layout.visual
        frame, row = layout.frame[visual], layout.row[visual]
        image = layout.image[visual]
        videos = torch.tensor([g.frames > 1 and not g.views for g in layout.grids])
        if isinstance(self.window, int):
            first = torch.cat([torch.zeros(1, dtype=torch.long), image.diff().ne(0).long()])
            starts = torch.nonzero(first[: len(image)].bool()).flatten()
            starts = torch.cat([torch.zeros(1, dtype=torch.long), starts])
            place = torch.arange(len(image)) - starts[torch.searchsorted(
                starts[1:].contiguous(), torch.arange(len(image)), right=True)]  # fmt: skip
            inner = place // self.window
            key = [image, inner]
        elif self.window == "frame":
            key = [image, frame]
        elif self.window == "row":
            key = [image, frame, row]
        else:
            whole_frames = videos[image] if len(image) else torch.zeros(0, dtype=torch.bool)
            key = [image, frame, torch.where(whole_frames, 0, row)]
        windows = torch.full((len(layout),), -1, dtype=torch.long)
        if len(image):
            _, number = torch.stack(key, 1).unique(dim=0, return_inverse=True)
            windows[visual] = number
        return windows

    def bits_of(self, scene: Scene, tokens: Tensor) -> Tensor:
        windows = self.windows(scene.layout)
        mine = windows[tokens]
        bits = torch.full_like(tokens, FULL_BITS)
        visual = mine >= 0
        if not bool(visual.any()):
            return bits
        there, number = mine[visual].unique(return_inverse=True)
        sizes = torch.bincount(number, minlength=len(there))
        bits[visual] = self.assign(scene.similarity()[there], sizes)[number]
        return bits

    def assign(self, similarity: Tensor, sizes: Tensor) -> Tensor:
        """``[W]`` int64, the bits of windows of ``sizes`` ``[W]`` tokens."""
        low, mid, high = self.bits
        if self.avg_bits is None:
            least, most = similarity.min(), similarity.max()
            bits = torch.full_like(sizes, mid)
            bits[similarity < least + self.alpha * (most - least)] = low
            bits[similarity > most - self.beta * (most - least)] = high
            return bits
        order = similarity.sort(descending=True, stable=True).indices
        room = self.avg_bits * int(sizes.sum()) - low * int(sizes.sum())
        bits = torch.full_like(sizes, low)
        full = int(_MOST_FULL * len(sizes) + 1e-9)
        level = high
        for place, window in enumerate(order.tolist()):
            if level == high and place >= full:
                level = mid
            cost = (level - low) * int(sizes[window])
            if level == high and cost > room:
                level, cost = mid, (mid - low) * int(sizes[window])
            if cost > room + 1e-6:
                break
            bits[window] = level
            room -= cost
        return bits

    def store(self, keys: Tensor, values: Tensor, bits: int, where: Where) -> Store:
        return Quantised.of(keys, values, bits)
