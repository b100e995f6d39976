"""An entry as it is kept: as it was computed, or with K and V as a hold method packs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from conduit_kv.errors import InputError, PlanError
from conduit_kv.layout import Grid, Layout
from conduit_kv.methods.hold import HoldMethod
from conduit_kv.methods.hold.base import FULL_BITS, Scene, Where
from conduit_kv.methods.hold.rtn import Rtn
from conduit_kv.plan import Plan
from conduit_kv.reuse.entry import Entry

FULL = Rtn()
"""Holds everything as it was computed."""
_NAMED = {"full": "rtn:16", "int8": "kivi:8"}


def holder(text: str) -> HoldMethod:
    """The hold method by which entries are to be kept.

    Parameters
    ----------
    text : str
        ``full``, ``int8`` (short for ``kivi:8``), or a hold method of a plan, such as ``kivi:4``.

    Raises
    ------
    InputError
        If it is none of them, or one that entries cannot be kept by.
    """
    try:
        plan = Plan.parse(_NAMED.get(text, text))
        method = plan.hold
        if method is None or len(list(plan)) > 1:
            raise PlanError("that is no method of the hold stage alone")
        method.check_entries()
    except PlanError as error:
        raise InputError(
            f"held={text!r}: entries are held as full, as int8, or by a hold method such as "
            f"kivi:4 ({error})"
        ) from None
    return method


@dataclass(frozen=True)
class Held:
    """An entry as a tier, or a request, holds it.

    Attributes
    ----------
    method : HoldMethod
        What its K and V are packed by; text is left as it is.
    tensors : dict
        Those of the entry. Where tokens are packed, ``keys`` and ``values`` have only the others,
        and ``bits`` ``[N]`` says which: then ``packed.<layer>.<bits>.<name>`` are the stores'.
    digest : str
    grid : Grid or None
    dtype : str
        Of K and V.
    seconds : float
        What it took to compute.
    """

    method: HoldMethod
    tensors: dict[str, Tensor]
    digest: str
    grid: Grid | None
    dtype: str
    seconds: float

    @property
    def kind(self) -> str:
        """``full``, or the method as a plan writes it."""
        return kind_of(self.method)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    @staticmethod
    def of(entry: Entry, method: HoldMethod = FULL) -> Held:
        """Hold an entry, on its device.

        Raises
        ------
        ModelError
            If K or V cannot be packed.
        """
        tensors = {name: tensor.detach() for name, tensor in entry.tensors().items()}
        if entry.grid is not None and not method.is_identity:
            tensors |= _packed(entry, method, entry.grid)
        dtype = str(entry.keys.dtype).removeprefix("torch.")
        return Held(method, tensors, entry.digest, entry.grid, dtype, entry.seconds)

    def entry(self) -> Entry:
        """The entry, K and V in their own dtype, as exact as they are held."""
        own = {name: x for name, x in self.tensors.items() if "." not in name and name != "bits"}
        bits = self.tensors.get("bits")
        if bits is not None:
            own["keys"], own["values"] = self._unpacked(bits.long())
        return Entry(digest=self.digest, grid=self.grid, seconds=self.seconds, **own)

    def _unpacked(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        rest = self.tensors["keys"], self.tensors["values"]
        whole = [x.new_empty((*x.shape[:2], len(bits), x.shape[3])) for x in rest]
        left = torch.nonzero(bits == FULL_BITS).flatten()
        for mine, part in zip(whole, rest, strict=True):
            mine[:, :, left] = part
        layers, heads = rest[0].shape[:2]
        widths = rest[0].shape[3], rest[1].shape[3]
        for level, at in _levels(bits):
            for layer in range(layers):
                begin = f"packed.{layer}.{level}."
                stored = {
                    name.removeprefix(begin): x
                    for name, x in self.tensors.items()
                    if name.startswith(begin)
                }
                where = _where(layer, heads, at, widths[0])
                store = self.method.restore(stored, level, widths, where)
                for mine, part in zip(whole, store.dense(rest[0].dtype), strict=True):
                    mine[layer][:, at] = part[:, : len(at)]
        return whole[0], whole[1]


def kind_of(method: HoldMethod) -> str:
    """``full``, or the method as a plan writes it."""
    return "full" if method.is_identity else str(method)


def _packed(entry: Entry, method: HoldMethod, grid: Grid) -> dict[str, Tensor]:
    """What takes the place of an image's keys and values."""
    layout = Layout.of(torch.ones(entry.tokens, dtype=torch.bool), [grid])
    tokens = torch.arange(entry.tokens)
    bits = method.bits_of(Scene(layout, _no_question, apart=True), tokens).to(entry.keys.device)
    left = torch.nonzero(bits >= FULL_BITS).flatten()
    found = {
        "keys": entry.keys[:, :, left],
        "values": entry.values[:, :, left],
        "bits": bits.to(torch.uint8),
    }
    for level, at in _levels(bits):
        for layer in range(entry.layers):
            where = _where(layer, entry.keys.shape[1], at, entry.keys.shape[3])
            mine = entry.keys[layer][:, at], entry.values[layer][:, at]
            store = method.store(*mine, level, where)
            for name, tensor in store.state().items():
                found[f"packed.{layer}.{level}.{name}"] = tensor
    return found


def _levels(bits: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each number of bits below the model's own, and which tokens ``[n]`` int64 have it."""
    for level in bits.unique().tolist():
        if level < FULL_BITS:
            yield level, torch.nonzero(bits == level).flatten()


def _where(layer: int, heads: int, tokens: Tensor, width: int) -> Where:
    """An entry's keys are position-free: their angles are 0."""

    def rotary(mine: Tensor) -> tuple[Tensor, Tensor]:
        cos = torch.ones((len(mine), width // 2), device=mine.device)
        return cos, torch.zeros_like(cos)

    return Where(layer, 0, heads, tokens, rotary)


def _no_question() -> Tensor:
    raise RuntimeError("an entry is packed before there is a question")
