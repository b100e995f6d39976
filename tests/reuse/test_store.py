"""The store: what is restored is what was kept, and what is damaged or foreign is a miss."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conduit_kv import InputError, Store
from conduit_kv.layout import Grid, Layout, View
from conduit_kv.methods.hold.base import Scene, Where
from conduit_kv.reuse import Entry, Key
from conduit_kv.reuse.disk import DiskTier
from conduit_kv.reuse.files import Damaged, dump, parse
from conduit_kv.reuse.held import Held, holder
from conduit_kv.reuse.store import CostModel, bytes_of

GRID = Grid(2, 2, 4, (View(1, 2, 3), View(0, 1, 2)))


def key_of(number: int = 0, **changes: Any) -> Key:
    key = Key("", "Model abc", "torch.float32", "", "context", f"content {number}", 8, "grid")
    return replace(key, **changes)


def entry_of(key: Key, number: int = 0, *, tokens: int = 8) -> Entry:
    torch.manual_seed(number)
    return Entry(
        digest=key.digest,
        keys=torch.randn(3, 2, tokens, 4),
        values=torch.randn(3, 2, tokens, 4),
        features=torch.randn(tokens, 6).bfloat16(),
        deepstack=torch.randn(0, tokens, 6),
        positions=torch.arange(tokens)[None],
        grid=GRID,
        seconds=9.0,
    )


def same(one: Entry, other: Entry) -> bool:
    tensors = zip(one.tensors().items(), other.tensors().items(), strict=True)
    return (
        one.digest == other.digest
        and one.grid == other.grid
        and all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in tensors)
    )


def filled(folder: Path, count: int = 3, **options: Any) -> tuple[Store, list[Key]]:
    store = Store(folder, **options)
    keys = [key_of(number) for number in range(count)]
    for number, key in enumerate(keys):
        store.put(key, entry_of(key, number))
    return store, keys


def file_of(folder: Path, key: Key) -> Path:
    return folder / "entries" / key.digest[:2] / f"{key.digest}.safetensors"


# -- kept and restored -------------------------------------------------------------------------


def test_restored_equals_kept(tmp_path: Path) -> None:
    store, keys = filled(tmp_path)
    again = Store(tmp_path)
    for number, key in enumerate(keys):
        for source, tier in ((store, "memory"), (again, "disk"), (again, "memory")):
            found = source.get(key)
            assert found is not None
            assert found.tier == tier
            assert same(found.entry, entry_of(key, number))
    assert store.get(key_of(99)) is None


HOLDERS = ("int8", "kivi:4", "rtn:2", "fp8", "random-windows:3.17", "stride-interpolate:0.5")


def large_entry(key: Key, dtype: torch.dtype = torch.bfloat16) -> Entry:
    """Six rows of ten tokens: a number that no block or group divides."""
    torch.manual_seed(3)
    return replace(
        entry_of(key, tokens=60),
        keys=torch.randn(3, 2, 60, 32).to(dtype),
        values=torch.randn(3, 2, 60, 32).to(dtype),
        grid=Grid(1, 6, 10),
    )


@pytest.mark.parametrize("held", HOLDERS)
def test_packed_entries_are_what_the_method_makes_of_them(tmp_path: Path, held: str) -> None:
    """From memory and from disk alike: K and V of every layer packed as a cache packs them."""
    key = key_of(dtype="torch.bfloat16", tokens=60)
    entry, method = large_entry(key), holder(held)
    store = Store(tmp_path, held=held)
    store.put(key, entry)
    cells = Layout.of(torch.ones(60, dtype=torch.bool), [entry.grid])
    bits = method.bits_of(Scene(cells, lambda: torch.empty(0), apart=True), torch.arange(60))
    for tier, source in (("memory", store), ("disk", Store(tmp_path, held=held))):
        found = source.get(key)
        assert found is not None
        assert found.tier == tier
        for name in ("features", "positions", "deepstack"):
            assert torch.equal(getattr(found.entry, name), getattr(entry, name))
        for number, name in enumerate(("keys", "values")):
            got, exact = getattr(found.entry, name), getattr(entry, name)
            assert got.dtype == exact.dtype
            assert torch.equal(got[:, :, bits == 16], exact[:, :, bits == 16])
            assert not torch.equal(got, exact)
            for level in set(bits.tolist()) - {16}:
                at = torch.nonzero(bits == level).flatten()
                for layer in range(3):
                    where = Where(layer, 0, 2, at, lambda t: (torch.ones(len(t), 16),
                                                              torch.zeros(len(t), 16)))  # fmt: skip
                    packed = method.store(
                        entry.keys[layer][:, at], entry.values[layer][:, at], level, where
                    ).dense(torch.bfloat16)[number]
                    assert torch.equal(got[layer][:, at], packed[:, : len(at)])
    assert Held.of(entry, method).nbytes < Held.of(entry).nbytes


def test_int8_is_close(tmp_path: Path) -> None:
    key = key_of(dtype="torch.bfloat16", tokens=60)
    entry = large_entry(key)
    store = Store(tmp_path, held="int8")
    store.put(key, entry)
    found = store.get(key)
    assert found is not None
    for name in ("keys", "values"):
        kept, stored = getattr(entry, name).float(), getattr(found.entry, name).float()
        # Half of 255 steps between a group's ends, in fp16, and bf16's own rounding.
        assert float((kept - stored).abs().max()) <= float(kept.abs().max()) * (1 / 255 + 2**-7)


def test_a_folder_remembers_how_it_holds_its_entries(tmp_path: Path) -> None:
    key = key_of(dtype="torch.bfloat16", tokens=60)
    Store(tmp_path)  # looked at, but nothing stored: it may still be told
    store = Store(tmp_path, held="int8")
    store.put(key, large_entry(key))
    again = Store(tmp_path)
    assert str(again.held) == str(store.held)
    found, kept = again.get(key), store.get(key)
    assert found is not None
    assert kept is not None
    assert torch.equal(found.entry.keys, kept.entry.keys)
    for other in ("full", "kivi:4"):
        with pytest.raises(InputError, match="holds its entries as kivi:8"):
            Store(tmp_path, held=other)
    assert Store(tmp_path, held="kivi:8").get(key) is not None
    (tmp_path / "index.sqlite").unlink()
    assert Store(tmp_path).get(key) is not None
    Store(tmp_path).clear()
    assert Store(tmp_path, held="full").held.is_identity
    # What is in a file is checked all the same.
    with pytest.raises(Damaged, match="held as kivi:8"):
        parse(dump(key, Held.of(large_entry(key), holder("int8"))), key)


def test_files_and_folders_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    old = os.umask(0)
    try:
        _, keys = filled(folder)
    finally:
        os.umask(old)
    for path in [folder, *folder.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o077 == 0, f"{path} can be read by others: {mode:o}"
    assert file_of(folder, keys[0]).is_file()


# -- what must be a miss ---------------------------------------------------------------------------


def test_every_bit_counts(tmp_path: Path) -> None:
    _, (key,) = filled(tmp_path, 1)
    path = file_of(tmp_path, key)
    data = bytearray(path.read_bytes())
    places = [*range(0, len(data), 41), len(data) - 1]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        path.write_bytes(flipped)
        store = Store(tmp_path)
        found = store.get(key)
        # Blanks of the header's padding may change; nothing that is read may.
        assert found is None or same(found.entry, entry_of(key)), f"byte {place}"
        if found is None:
            store.put(key, entry_of(key))


@pytest.mark.parametrize("length", (0, 5, 8, 100, -1))
def test_a_truncated_file_is_a_miss(tmp_path: Path, length: int) -> None:
    _, (key,) = filled(tmp_path, 1)
    path = file_of(tmp_path, key)
    path.write_bytes(path.read_bytes()[:length])
    store = Store(tmp_path)
    assert store.get(key) is None
    assert not path.exists()
    assert store.notes
    store.put(key, entry_of(key))
    assert Store(tmp_path).get(key) is not None


@pytest.mark.parametrize(
    "changes",
    (
        {"tenant": "someone"},
        {"model": "Model other weights"},
        {"dtype": "torch.bfloat16"},
        {"processor": "other settings"},
        {"context": "none"},
        {"content": "other pixels"},
        {"tokens": 9},
        {"grid": "100x30"},
    ),
)
def test_the_entry_of_something_else_is_a_miss(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Even where its file lies under the wanted name, as if digests had collided."""
    _, (key,) = filled(tmp_path, 1)
    wanted = replace(key, **changes)
    assert Store(tmp_path).get(wanted) is None
    path = file_of(tmp_path, wanted)
    path.parent.mkdir(exist_ok=True)
    shutil.copy(file_of(tmp_path, key), path)
    (tmp_path / "index.sqlite").unlink()
    store = Store(tmp_path)
    store.disk._do(  # type: ignore[union-attr]
        lambda index: index.execute(
            "INSERT OR REPLACE INTO entries VALUES (?,1,8,1,'','','',9,0,0,1,'')", (wanted.digest,)
        )
    )
    assert store.get(wanted) is None
    assert any("something else" in note for note in store.notes)
    assert Store(tmp_path).get(key) is not None


def test_keys_are_compared_whole_in_memory() -> None:
    store = Store()
    key = key_of()
    store.put(key, entry_of(key))

    class Colliding(Key):
        digest = key.digest

    assert store.get(Colliding(**asdict(key_of(1)))) is None


def test_another_version_is_a_miss_that_verify_explains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conduit_kv.reuse.files.FILE_VERSION", 0)
    _, (key,) = filled(tmp_path, 1)
    monkeypatch.undo()
    store = Store(tmp_path)
    assert store.get(key) is None
    assert store.disk is not None
    ((digest, problem),) = store.disk.verify()
    assert digest == key.digest
    assert "version 0" in problem


def test_verify_finds_what_is_wrong(tmp_path: Path) -> None:
    store, keys = filled(tmp_path, 4)
    assert store.disk is not None
    assert [problem for _, problem in store.disk.verify()] == [""] * 4
    file_of(tmp_path, keys[0]).unlink()
    broken = file_of(tmp_path, keys[1])
    broken.write_bytes(broken.read_bytes()[:-3])
    moved = file_of(tmp_path, keys[2])
    moved.rename(moved.with_name("0" * 64 + ".safetensors"))
    problems = dict(store.disk.verify())
    assert "missing" in problems[keys[0].digest]
    assert "damaged" in problems[keys[1].digest]
    assert "another's name" in problems["0" * 64]
    assert problems[keys[3].digest] == ""


def test_parse_refuses_what_is_no_entry() -> None:
    key = key_of()
    for data in (b"", b"x", b"\0" * 64, b"\xff" * 64, json.dumps({"a": 1}).encode()):
        with pytest.raises(Damaged):
            parse(data, key)
    assert parse(dump(key, Held.of(entry_of(key))), key).digest == key.digest


# -- limits ----------------------------------------------------------------------------------------


def test_memory_is_limited_in_bytes_and_forgets_the_oldest() -> None:
    size = entry_of(key_of()).nbytes
    store = Store(memory=3 * size)
    keys = [key_of(number) for number in range(5)]
    for number, key in enumerate(keys[:3]):
        store.put(key, entry_of(key, number))
    assert store.get(keys[0]) is not None  # used: the second is the oldest now
    store.put(keys[3], entry_of(keys[3], 3))
    assert store.memory.nbytes == 3 * size
    assert [store.get(key) is not None for key in keys] == [True, False, True, True, False]
    small = Store(memory=size - 1)
    small.put(keys[0], entry_of(keys[0]))
    assert small.get(keys[0]) is None
    assert small.memory.nbytes == 0


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_disk_is_limited_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 300_000
    store = Store(tmp_path, max_bytes=limit, memory=0)
    seen: list[int] = []
    replace_file = os.replace

    def watch(source: Any, target: Any) -> None:
        seen.append(folder_bytes(tmp_path))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", watch)
    keys = [key_of(number) for number in range(40)]
    for number, key in enumerate(keys):
        store.put(key, entry_of(key, number))
        seen.append(folder_bytes(tmp_path))
    assert max(seen) <= limit
    assert store.disk is not None
    held = [store.disk.look_up(key.digest) is not None for key in keys]
    assert held[-1]
    assert sum(held) > 3
    assert held == sorted(held)  # the newest ones
    huge = Store(tmp_path, max_bytes=10)
    huge.put(key_of(99), entry_of(key_of(99)))
    assert any("limit" in note for note in huge.notes)


def test_order_of_use_does_not_ask_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that goes back makes no entry older than it is."""
    clock = iter(range(10_000, 0, -50))
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    size = len(dump(key_of(), Held.of(entry_of(key_of()))))
    store = Store(tmp_path, memory=0)
    assert store.disk is not None
    store.disk.max_bytes = store.disk._index_bytes() + 3 * size + 200_000
    keys = [key_of(number) for number in range(3)]
    for number, key in enumerate(keys):
        store.put(key, entry_of(key, number))
    assert store.get(keys[0]) is not None
    order = [row.digest for row in store.disk.rows()]
    assert order == [keys[0].digest, keys[2].digest, keys[1].digest]
    assert store.disk.prune(max_bytes=2 * size + 10) == 1
    assert store.disk.look_up(keys[1].digest) is None
    assert store.disk.prune(older_than=10.0) == 0  # made "in the future": not old


def test_a_full_disk_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DiskTier, "_write_file", staticmethod(full))
    key = key_of()
    store.put(key, entry_of(key))
    assert any("No space left" in note for note in store.notes)
    found = store.get(key)
    assert found is not None  # memory has it
    monkeypatch.undo()
    assert not list((tmp_path / "writing").iterdir())
    assert Store(tmp_path).get(key) is None
    store.put(key, entry_of(key))
    assert Store(tmp_path).get(key) is not None


def test_an_index_that_is_no_database_is_read_anew_from_the_files(tmp_path: Path) -> None:
    store, keys = filled(tmp_path)
    assert store.disk is not None
    store.disk.close()
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "index.sqlite").write_bytes(b"not a database at all, but long enough" * 50)
    again = Store(tmp_path)
    assert all(again.get(key) is not None for key in keys)


# -- several processes -------------------------------------------------------------------------

_WRITER = """
    import sys
    from pathlib import Path
    from tests.reuse.test_store import entry_of, key_of
    from conduit_kv import Store
    store = Store(sys.argv[1], memory=0, max_bytes=int(sys.argv[4]))
    print("ready", flush=True)
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        store.put(key_of(number), entry_of(key_of(number), number, tokens=8))
        print(number, flush=True)
    print("notes", store.notes, flush=True)
"""


def writer(folder: Path, first: int, stop: int, limit: int = 10**9) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_WRITER), *map(str, (folder, first, stop, limit))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"},
    )


def test_two_writers_share_a_folder_and_a_limit(tmp_path: Path) -> None:
    limit = 400_000
    both = [writer(tmp_path, 0, 40, limit), writer(tmp_path, 20, 60, limit)]
    for one in both:
        output, _ = one.communicate(timeout=120)
        assert one.returncode == 0
        assert "notes []" in output
    store = Store(tmp_path, max_bytes=limit)
    assert folder_bytes(tmp_path) <= limit
    assert store.disk is not None
    assert all(problem == "" for _, problem in store.disk.verify())
    rows = store.disk.rows()
    assert rows
    for row in rows:
        number = next(n for n in range(60) if key_of(n).digest == row.digest)
        found = store.get(key_of(number))
        assert found is not None
        assert same(found.entry, entry_of(key_of(number), number))


def test_killed_while_writing(tmp_path: Path) -> None:
    """kill -9 at any moment: nothing wrong is ever read, and what was left behind is swept away."""
    for round_number in range(4):
        one = writer(tmp_path, 0, 10**6)
        assert one.stdout is not None
        for _ in range(2 + 5 * round_number):  # some written entries
            one.stdout.readline()
        one.send_signal(signal.SIGKILL)
        one.wait()
        store = Store(tmp_path)
        assert store.disk is not None
        assert not list((tmp_path / "writing").iterdir())
        assert all(problem == "" for _, problem in store.disk.verify())
        for number in range(5 * round_number):
            found = store.get(key_of(number))
            assert found is not None
            assert same(found.entry, entry_of(key_of(number), number))
        store.disk.clear()
        store.disk.close()


def test_what_a_dead_writer_left_is_swept_and_a_live_ones_is_not(tmp_path: Path) -> None:
    dead = DiskTier(tmp_path, 10**9)
    alive = DiskTier(tmp_path, 10**9)
    for tier, number in ((dead, 0), (alive, 1)):
        key = key_of(number)
        assert tier._do(lambda index, tier=tier, key=key: tier._take_place(index, key, 1.0, 100))
        (tmp_path / "writing" / f"{tier.owner}.{key.digest}").write_bytes(b"half")
    os.close(dead._alive)  # as the kernel does when a process dies
    dead._alive = -1
    DiskTier(tmp_path, 10**9)
    left = [path.name for path in (tmp_path / "writing").iterdir()]
    assert left == [f"{alive.owner}.{key_of(1).digest}"]
    (count,) = (
        sqlite3.connect(tmp_path / "index.sqlite")
        .execute("SELECT count(*) FROM entries WHERE ready = 0")
        .fetchone()
    )
    assert count == 1


# -- whether to load -------------------------------------------------------------------------------


def test_an_entry_is_loaded_only_where_that_is_faster() -> None:
    costs = CostModel()
    assert costs.worth_loading("disk", 10**6, "image", 100, 1.0)  # nothing measured: tried
    costs.loaded("disk", 10**6, 0.5)
    assert costs.worth_loading("disk", 10**6, "image", 100, filled=1.0)
    assert not costs.worth_loading("disk", 10**6, "image", 100, filled=0.1)
    costs.filled("image", 100, 1.0)
    assert costs.worth_loading("disk", 10**6, "image", 100, filled=0.1)
    assert not costs.worth_loading("disk", 10**7, "image", 100, filled=0.1)
    # What text takes says nothing of images.
    assert not costs.worth_loading("disk", 10**6, "text", 100, filled=0.1)


def test_a_slow_disk_is_left_for_computing(tmp_path: Path) -> None:
    _, keys = filled(tmp_path)
    store = Store(tmp_path)
    store.costs.loaded("disk", 1, 100.0)
    assert store.get(keys[0]) is None
    assert any("faster than loading" in note for note in store.notes)
    # But one slow load does not shut it out for good.
    assert any(store.get(keys[0]) is not None for _ in range(100))


# -- settings --------------------------------------------------------------------------------------


def test_sizes_are_read_and_refused() -> None:
    assert bytes_of("64MB") == 64 * 10**6
    assert bytes_of(5) == 5
    for wrong in ("0.5", "much", "-1"):
        with pytest.raises(InputError):
            bytes_of(wrong)
    for wrong in ("int4", "tgv-kv:0.2", "kivi:4 + tgv-kv:0.2", "kivi:5", ""):
        with pytest.raises(InputError, match="entries are held as full, as int8, or by"):
            Store(held=wrong)
    with pytest.raises(InputError, match="depend on the question"):
        Store(held="windowquant:3.17")
    with pytest.raises(InputError, match="no text is kept"):
        Store(held="kivi:4(of=prompt)")


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used as a store"):
        Store(tmp_path / "file")
