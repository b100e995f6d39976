"""A request's cache: what its layers hold, and what it has seen."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import Cache

from conduit_kv.cache.layer import VisualLayer, crop_count
from conduit_kv.cache.progress import Progress
from conduit_kv.errors import PlanError


class VisualCache(Cache):  # type: ignore[misc]
    """Keys and values of a request, per layer, with which tokens they are.

    A subclass of Transformers' ``Cache``: ``generate``, beam search and a later ``generate`` that
    continues from it work. ``get_seq_length()`` is the tokens seen, not the tokens held.

    Parameters
    ----------
    kinds : sequence of str
        ``"full"`` or ``"sliding"``, per decoder layer.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        self.progress = Progress()
        self.rotary: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        """Position ids ``[axes, T]`` to cosines and sines ``[T, d/2]`` of the model's RoPE."""
        super().__init__(layers=[VisualLayer(self.progress, kind) for kind in kinds])

    def __iter__(self) -> Iterator[VisualLayer]:
        return iter(self.layers)

    def held(self, layer: int, row: int = 0, head: int = 0) -> Tensor:
        """``[S]`` int64 ascending: the tokens that a layer holds of a sequence."""
        return self.layers[layer].held(row, head)  # type: ignore[no-any-return]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns, in all layers or in none.

        Raises
        ------
        PlanError
            If eviction has acted on some of them in some layer.
        """
        count = crop_count(tokens_to_remove)
        if count > self.progress.seen:
            raise PlanError(f"cannot take back {count} of {self.progress.seen} tokens")
        for layer in self.layers:
            layer.check_crop(count)
        for layer in self.layers:
            layer.crop(-count)
        if count:
            self.progress.crop(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(self.progress.batch).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.select_rows(rows)
        self.progress.select_rows(rows.tolist())

    def reset(self) -> None:
        super().reset()
        self.progress.__init__()  # type: ignore[misc]

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        """Every tensor held for the request: its kind, itself, and the bytes of it in use."""
        for layer in self.layers:
            yield from layer.tensors()
        yield from self.progress.tensors()

    def bytes_in_use(self) -> dict[str, int]:
        """Bytes that hold tokens, by kind."""
        total: dict[str, int] = {}
        for kind, _, used in self.tensors():
            total[kind] = total.get(kind, 0) + used
        return total

    def bytes_allocated(self) -> dict[str, int]:
        """Bytes of the storages behind them, by kind: slack and padding included."""
        total: dict[str, int] = {}
        counted: set[int] = set()
        for kind, tensor, _ in self.tensors():
            storage = tensor.untyped_storage()
            new = storage.nbytes() if storage.data_ptr() not in counted else 0
            counted.add(storage.data_ptr())
            total[kind] = total.get(kind, 0) + new
        return total


def borrowed(cache: VisualCache) -> VisualCache:
    """The cache, for those that it holds itself.

    A strong reference back would be a cycle, and K and V of a request that has ended would stay
    until Python looks for cycles: gigabytes, since it counts objects and not their bytes.
    """
    proxy = cache if isinstance(cache, weakref.ProxyType) else weakref.proxy(cache)
    return cast(VisualCache, proxy)
