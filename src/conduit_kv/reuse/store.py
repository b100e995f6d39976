"""The store: entries in memory, over files on disk, over Redis.

A lookup goes down the tiers and what it finds comes up; an entry is written to all of them. Nothing
that a tier does can fail a request: what cannot be read is a miss, what cannot be written is not
stored, and :attr:`Store.notes` says why.

An entry can reveal the image or text that it was made from: it holds what the model saw of it.
Treat a store as you would treat these.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from conduit_kv.budget import Budget
from conduit_kv.errors import InputError
from conduit_kv.reuse.disk import DiskTier
from conduit_kv.reuse.entry import Entry
from conduit_kv.reuse.files import Damaged, dump, parse
from conduit_kv.reuse.held import Held, holder, kind_of
from conduit_kv.reuse.keys import Key
from conduit_kv.reuse.redis import RedisTier

_NOTES = 100
"""Most notes kept: the newest."""


@dataclass(frozen=True)
class Found:
    """An entry that was in the store.

    Attributes
    ----------
    entry : Entry
    tier : {"memory", "disk", "redis"}
    seconds : float
        What loading took.
    """

    entry: Entry
    tier: Literal["memory", "disk", "redis"]
    seconds: float


@dataclass
class CostModel:
    """What loading and computing cost here, measured as they happen.

    An entry is loaded only if that is expected to be faster than computing it. What has not been
    measured yet is tried.

    Attributes
    ----------
    load : dict
        Per tier: seconds per byte of its last loads.
    fill : dict
        Per kind (``image``, ``text``): seconds per token of what was computed last.
    """

    load: dict[str, float] = field(default_factory=dict)
    fill: dict[str, float] = field(default_factory=dict)
    weight: float = 0.3

    def loaded(self, tier: str, size: int, seconds: float) -> None:
        """Take in a load."""
        self._take_in(self.load, tier, seconds / max(size, 1))

    def filled(self, kind: str, tokens: int, seconds: float) -> None:
        """Take in an image prefilled alone, or a block of text."""
        self._take_in(self.fill, kind, seconds / max(tokens, 1))

    def _take_in(self, known: dict[str, float], name: str, now: float) -> None:
        known[name] = (1 - self.weight) * known.get(name, now) + self.weight * now

    def passed_over(self, tier: str) -> None:
        """Take in that an entry was not loaded: one slow load keeps a tier out for a while only."""
        self.load[tier] *= 1 - self.weight

    def worth_loading(self, tier: str, size: int, kind: str, tokens: int, filled: float) -> bool:
        """Whether to load an entry of ``size`` bytes rather than to compute its ``tokens`` tokens.

        Parameters
        ----------
        filled : float
            What filling it took when that was done, for a process that has filled nothing yet.
        """
        load = self.load[tier] * size if tier in self.load else None
        compute = self.fill[kind] * tokens if kind in self.fill else filled
        return load is None or not compute or load < compute


class MemoryTier:
    """Entries in memory, the least recently used going first.

    Parameters
    ----------
    max_bytes : int
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.nbytes = max_bytes, 0
        self._held: OrderedDict[str, tuple[Key, Held]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Key) -> Held | None:
        """The entry of ``key``; the keys are compared whole."""
        stored = self._held.get(key.digest)
        if stored is None or stored[0] != key:
            return None
        self._held.move_to_end(key.digest)
        return stored[1]

    def put(self, key: Key, held: Held) -> None:
        """Hold an entry, unless it alone is above the limit."""
        self.remove(key.digest)
        if held.nbytes > self.max_bytes:
            return
        while self.nbytes + held.nbytes > self.max_bytes:
            self.remove(next(iter(self._held)))
        self._held[key.digest] = key, held
        self.nbytes += held.nbytes

    def remove(self, digest: str) -> None:
        """Forget an entry, if it is there."""
        stored = self._held.pop(digest, None)
        if stored is not None:
            self.nbytes -= stored[1].nbytes

    def clear(self) -> None:
        """Forget all of them."""
        self._held.clear()
        self.nbytes = 0


class Store:
    """Entries of images and of text, shared by requests, processes and machines.

    Parameters
    ----------
    folder : path, optional
        Of the disk tier; several processes may share it. Without one there is none.
    max_bytes : int or str
        Limit of the disk tier, for example ``"8GB"``. It is never exceeded.
    memory : int or str
        Limit of the memory tier.
    redis : str or client, optional
        ``"redis://host:port/0"`` or a client of redis-py.
    tenant : str
        Whose entries these are. Stores of different tenants share nothing, in whatever tier.
    held : str, optional
        How an image's K and V are held: ``full``, as they were computed; ``int8``, short for
        ``kivi:8``; or by any hold method whose bits do not depend on a question (``kivi:4``,
        ``fp8``, ``kvcapsule:0.4``), which makes them smaller and changes answers. By default as
        the folder holds them; a new one, and memory alone, ``full``.
    timeout : float
        Seconds after which Redis is taken to be away.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        max_bytes: int | str = "8GB",
        memory: int | str = "1GB",
        redis: Any = None,
        tenant: str = "",
        held: str | None = None,
        timeout: float = 0.25,
    ) -> None:
        self.tenant, self.held = tenant, holder("full" if held is None else held)
        self.memory = MemoryTier(bytes_of(memory))
        self.disk = DiskTier(Path(folder), bytes_of(max_bytes)) if folder is not None else None
        if self.disk is not None:
            there = self.disk.held_as(None if held is None else kind_of(self.held))
            if held is not None and kind_of(self.held) != there:
                raise InputError(
                    f"{folder} holds its entries as {there}, not as {held}: leave held= (--held) "
                    "out, or name another folder"
                )
            self.held = holder(there)
        self.redis = RedisTier(redis, timeout) if redis is not None else None
        self.costs = CostModel()
        self.notes: list[str] = []
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        tiers = [f"memory {self.memory.max_bytes} B"]
        tiers += [f"disk {self.disk.folder}"] if self.disk is not None else []
        tiers += ["redis"] if self.redis is not None else []
        return f"Store({', '.join(tiers)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        """A copied request goes on with the same store."""
        return self

    def note(self, text: str) -> None:
        """Remember what went wrong, or was not done."""
        with self._lock:
            if text not in self.notes:
                self.notes = [*self.notes[1 - _NOTES :], text]

    def get(self, key: Key) -> Found | None:
        """The entry of ``key``; None if there is none, or computing it is expected to be faster."""
        start = time.perf_counter()
        with self._lock:
            held = self.memory.get(key)
        if held is not None:
            return Found(held.entry(), "memory", time.perf_counter() - start)
        tiers: list[DiskTier | RedisTier] = [
            tier for tier in (self.disk, self.redis) if tier is not None
        ]
        for tier in tiers:
            found = self._get(tier, key)
            if found is not None:
                self._promote(tier, key, found)
                seconds = time.perf_counter() - start
                return Found(found.entry(), tier.name, seconds)
        return None

    def _get(self, tier: DiskTier | RedisTier, key: Key) -> Held | None:
        try:
            known = tier.look_up(key.digest)
            if known is None:
                return None
            size, filled = known
            if not self.costs.worth_loading(tier.name, size, key.kind, key.tokens, filled):
                self.costs.passed_over(tier.name)
                self.note(f"{tier.name}: computing an entry of {size} bytes is faster than loading")
                return None
            start = time.perf_counter()
            data = tier.read(key.digest)
            if data is None:
                return None
            held = parse(data, key, self.held)
            self.costs.loaded(tier.name, size, time.perf_counter() - start)
            return held
        except Damaged as error:
            self.note(f"{tier.name}: {key.digest[:12]} is not used: {error}")
            if error.remove:
                tier.remove(key.digest)
        except OSError as error:
            self.note(f"{tier.name}: cannot be read: {error}")
        return None

    def _promote(self, tier: DiskTier | RedisTier, key: Key, held: Held) -> None:
        with self._lock:
            self.memory.put(key, held)
        if tier is self.redis and self.disk is not None:
            self._write(self.disk, key, held)

    def put(self, key: Key, entry: Entry) -> Entry:
        """Store an entry in all tiers.

        Returns
        -------
        Entry
            As a later request will find it, so that the first one answers alike.
        """
        self.costs.filled(key.kind, entry.tokens, entry.seconds)
        held = Held.of(entry.to(torch.device("cpu")), self.held)
        with self._lock:
            self.memory.put(key, held)
        for tier in (self.disk, self.redis):
            if tier is not None:
                self._write(tier, key, held)
        return entry if self.held.is_identity else held.entry().to(entry.keys.device)

    def _write(self, tier: DiskTier | RedisTier, key: Key, held: Held) -> None:
        try:
            tier.write(key, held.seconds, dump(key, held))
        except OSError as error:
            self.note(f"{tier.name}: an entry was not stored: {error}")

    def forget(self, key: Key) -> None:
        """Remove an entry from all tiers."""
        with self._lock:
            self.memory.remove(key.digest)
        for tier in (self.disk, self.redis):
            if tier is not None:
                tier.remove(key.digest)

    def clear(self) -> None:
        """Remove all entries from memory and disk, and this store's from Redis."""
        with self._lock:
            self.memory.clear()
        for tier in (self.disk, self.redis):
            if tier is not None:
                tier.clear()

    def nbytes_by_tier(self) -> dict[str, int]:
        """Bytes held now, per tier of this machine."""
        found = {"memory": self.memory.nbytes}
        if self.disk is not None:
            found["disk"] = self.disk.nbytes
        return found


def bytes_of(value: int | str) -> int:
    """Bytes from a number, or from a number with a unit.

    Raises
    ------
    InputError
        If it is neither.
    """
    if isinstance(value, str) and value.strip().upper() in ("0", "0B"):
        return 0
    if isinstance(value, str):
        try:
            budget = Budget.parse(value)
        except ValueError as error:
            raise InputError(f"{value!r} is no size: {error}") from None
        if budget.unit == "share":
            raise InputError(f"{value!r} is no size: write a number of bytes, or 64MB, or 8GB")
        value = int(budget.value)
    if value < 0:
        raise InputError(f"a limit of {value} bytes is below nothing")
    return value
