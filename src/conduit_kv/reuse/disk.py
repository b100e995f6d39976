"""The disk tier: one file per entry, an index beside them, shared by processes.

A file is written under another name, synced and renamed, so that a reader sees it whole or not at
all. Its place is taken in the index before it is written and older entries leave first, so that the
limit holds at any moment. Whoever takes a place holds a lock on a file of its own as long as it
lives: what a killed process has left behind is found by that, and removed by the next one.

Entries are ordered by a counter, not by the clock, which may go back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from conduit_kv.errors import InputError
from conduit_kv.reuse.files import Damaged, header_of, parse
from conduit_kv.reuse.keys import Key

T = TypeVar("T")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    digest TEXT PRIMARY KEY, bytes INTEGER, tokens INTEGER, seconds REAL, tenant TEXT, model TEXT,
    key TEXT, used INTEGER, uses INTEGER, made REAL, ready INTEGER, owner TEXT);
CREATE INDEX IF NOT EXISTS by_use ON entries (used);
"""
_BUSY_SECONDS = 10.0
_HEADER = 1 << 16
_SLACK = 1 << 16
"""Bytes by which the index may grow before its size is looked at again."""


@dataclass(frozen=True)
class Row:
    """What the index knows of an entry.

    Attributes
    ----------
    digest : str
    bytes, tokens : int
    seconds : float
        What it took to compute.
    tenant, model : str
    used, uses : int
        When it was last used, on a counter, and how often.
    made : float
        Seconds since the epoch, by the clock of the machine that made it.
    kind : {"image", "text"}
    """

    digest: str
    bytes: int
    tokens: int
    seconds: float
    tenant: str
    model: str
    used: int
    uses: int
    made: float
    kind: Literal["image", "text"]


class DiskTier:
    """Entries in a folder.

    Parameters
    ----------
    folder : Path
        Made, for its owner alone, if it is not there.
    max_bytes : int
        Of all that lies in the folder.

    Raises
    ------
    InputError
        If the folder cannot be used.
    """

    name: Literal["disk"] = "disk"

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder.expanduser(), max_bytes
        self.owner = uuid.uuid4().hex
        self._lock = threading.RLock()
        try:
            for part in (self.folder, self._entries, self._writing, self._owners):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._alive = os.open(self._owners / self.owner, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._alive, fcntl.LOCK_EX)
            self._index = self._open_index()
            self.sweep()
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{folder} cannot be used as a store: {error}") from None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        if getattr(self, "_alive", -1) >= 0:
            os.close(self._alive)
            self._alive = -1
            with contextlib.suppress(OSError):
                os.unlink(self._owners / self.owner)
            self._index.close()

    @property
    def _entries(self) -> Path:
        return self.folder / "entries"

    @property
    def _writing(self) -> Path:
        return self.folder / "writing"

    @property
    def _owners(self) -> Path:
        return self.folder / "owners"

    def path(self, digest: str) -> Path:
        """Where an entry's file lies."""
        return self._entries / digest[:2] / f"{digest}.safetensors"

    # -- the index ---------------------------------------------------------------------------

    def _open_index(self) -> sqlite3.Connection:
        path = self.folder / "index.sqlite"
        new = not path.exists()
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        try:
            index = self._connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            # Not a database any more: the files say all that it said, but for the order of use.
            for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            index, new = self._connect(path), True
        if new:
            self._read_files(index)
        return index

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        index = sqlite3.connect(
            path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        index.execute("PRAGMA journal_mode=WAL")
        index.execute("PRAGMA synchronous=NORMAL")
        index.execute("PRAGMA wal_autocheckpoint=16")
        index.executescript(_SCHEMA)
        return index

    def _read_files(self, index: sqlite3.Connection) -> None:
        """Fill a new index from the files that are there already."""
        for path in self._entries.glob("*/*.safetensors"):
            try:
                with path.open("rb") as file:
                    header = header_of(file.read(_HEADER))
                key = Key(**json.loads(header["key"]))
            except (Damaged, OSError, ValueError, KeyError, TypeError):
                continue  # verify says what is wrong with it
            values = self._values(key, path.stat().st_size, float(header["seconds"]), 1)
            marks = ",".join("?" * len(values))
            index.execute(f"INSERT OR IGNORE INTO entries VALUES ({marks})", values)

    def _values(self, key: Key, size: int, seconds: float, used: int) -> tuple[Any, ...]:
        text = json.dumps(asdict(key), sort_keys=True)
        made = time.time()
        return (
            key.digest, size, key.tokens, seconds, key.tenant, key.model, text, used, 0, made, 1, ""
        )  # fmt: skip

    def _do(self, work: Callable[[sqlite3.Connection], T], *, write: bool = True) -> T:
        """Do ``work`` in a transaction; an error of the index is an OSError."""
        with self._lock:
            try:
                self._index.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    found = work(self._index)
                except BaseException:
                    self._index.execute("ROLLBACK")
                    raise
                self._index.execute("COMMIT")
                return found
            except sqlite3.Error as error:
                raise OSError(f"the index: {error}") from None

    @property
    def nbytes(self) -> int:
        """Bytes of all files of entries, those that are being written included."""
        with self._lock:
            (total,) = self._index.execute("SELECT sum(bytes) FROM entries").fetchone()
        return int(total or 0)

    def _index_bytes(self) -> int:
        total = 0
        for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
            with contextlib.suppress(FileNotFoundError):
                total += (self.folder / name).stat().st_size
        return total

    # -- what the store calls ----------------------------------------------------------------

    def look_up(self, digest: str) -> tuple[int, float] | None:
        """Bytes of an entry and the seconds it took to compute; None if it is not there."""
        with self._lock:
            try:
                row = self._index.execute(
                    "SELECT bytes, seconds FROM entries WHERE digest = ? AND ready = 1", (digest,)
                ).fetchone()
            except sqlite3.Error as error:
                raise OSError(f"the index: {error}") from None
        return None if row is None else (int(row[0]), float(row[1]))

    def read(self, digest: str) -> bytes | None:
        """An entry's bytes."""
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            self.remove(digest)
            return None
        with contextlib.suppress(OSError):  # an index that cannot be written still serves
            self._do(
                lambda index: index.execute(
                    "UPDATE entries SET uses = uses + 1, "
                    "used = (SELECT max(used) + 1 FROM entries) WHERE digest = ?",
                    (digest,),
                )
            )
        return data

    def write(self, key: Key, seconds: float, data: bytes) -> None:
        """Store an entry's bytes, unless it is there, or is being written by someone else.

        Raises
        ------
        OSError
            If it cannot be written, or is above the limit.
        """
        if not self._do(lambda index: self._take_place(index, key, seconds, len(data))):
            return
        path = self.path(key.digest)
        waiting = self._writing / f"{self.owner}.{key.digest}"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._write_file(waiting, data)
            os.replace(waiting, path)
            self._sync(path.parent)
            ready = "UPDATE entries SET ready = 1, owner = '' WHERE digest = ?"
            self._do(lambda index: index.execute(ready, (key.digest,)))
        except BaseException:
            for file in (waiting, path):
                with contextlib.suppress(OSError):
                    os.unlink(file)
            with contextlib.suppress(OSError):
                self._delete_row(key.digest)
            raise

    def _take_place(self, index: sqlite3.Connection, key: Key, seconds: float, size: int) -> bool:
        if index.execute("SELECT 1 FROM entries WHERE digest = ?", (key.digest,)).fetchone():
            return False
        limit = self.max_bytes - self._index_bytes() - _SLACK
        if size > limit:
            raise OSError(f"it has {size} bytes, and the limit of {self.folder} leaves {limit}")
        total, newest = index.execute("SELECT sum(bytes), max(used) FROM entries").fetchone()
        total = int(total or 0)
        oldest = index.execute("SELECT digest, bytes FROM entries WHERE ready = 1 ORDER BY used")
        for digest, freed in oldest.fetchall():
            if total + size <= limit:
                break
            self._unlink(digest)
            index.execute("DELETE FROM entries WHERE digest = ?", (digest,))
            total -= freed
        if total + size > limit:
            raise OSError("others are writing as much as the limit allows")
        values = self._values(key, size, seconds, int(newest or 0) + 1)
        marks = ",".join("?" * len(values))
        index.execute(f"INSERT INTO entries VALUES ({marks})", (*values[:-2], 0, self.owner))
        return True

    @staticmethod
    def _write_file(path: Path, data: bytes) -> None:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    @staticmethod
    def _sync(folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _unlink(self, digest: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(digest))

    def _delete_row(self, digest: str) -> None:
        self._do(lambda index: index.execute("DELETE FROM entries WHERE digest = ?", (digest,)))

    def remove(self, digest: str) -> None:
        """Remove an entry."""
        with contextlib.suppress(OSError):
            self._unlink(digest)
            self._delete_row(digest)

    def held_as(self, wanted: str | None = None) -> str:
        """How the folder's entries are held; while it has none, what is wanted is remembered."""
        path = self.folder / "held"
        if not self.rows() and not (path.exists() and wanted is None):
            mine = self._writing / f"{self.owner}.held"
            self._write_file(mine, (wanted or "full").encode())
            os.replace(mine, path)
        # Folders of before hold everything as it was computed.
        return path.read_text().strip() if path.exists() else "full"

    def clear(self) -> None:
        """Remove all entries."""
        for row in self.rows():
            self.remove(row.digest)
        for path in self._entries.glob("*/*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    # -- looking after the folder --------------------------------------------------------------

    def rows(self) -> list[Row]:
        """All entries, the most recently used first."""
        with self._lock:
            found = self._index.execute(
                "SELECT digest, bytes, tokens, seconds, tenant, model, used, uses, made, key "
                "FROM entries WHERE ready = 1 ORDER BY used DESC"
            ).fetchall()
        return [Row(*(*known, Key(**json.loads(key)).kind)) for *known, key in found]

    def sweep(self) -> int:
        """Remove what killed processes have left behind; gives how many files and places."""
        dead = [owner for owner in self._known_owners() if self._is_dead(owner)]
        gone = 0
        for owner in dead:
            for file in self._writing.glob(f"{owner}.*"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file)
                    gone += 1

            def forget(index: sqlite3.Connection, owner: str = owner) -> int:
                taken = "SELECT digest FROM entries WHERE ready = 0 AND owner = ?"
                digests = [row[0] for row in index.execute(taken, (owner,)).fetchall()]
                for digest in digests:
                    self._unlink(digest)
                    index.execute("DELETE FROM entries WHERE digest = ?", (digest,))
                return len(digests)

            gone += self._do(forget)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._owners / owner)
        return gone

    def _known_owners(self) -> set[str]:
        owners = {path.name for path in self._owners.iterdir()}
        owners |= {path.name.partition(".")[0] for path in self._writing.iterdir()}
        with self._lock:
            rows = self._index.execute("SELECT DISTINCT owner FROM entries WHERE ready = 0")
            owners |= {row[0] for row in rows.fetchall()}
        return owners - {self.owner}

    def _is_dead(self, owner: str) -> bool:
        try:
            handle = os.open(self._owners / owner, os.O_RDWR)
        except OSError:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            os.close(handle)

    def verify(self) -> Iterator[tuple[str, str]]:
        """Read every file; gives its digest and what is wrong with it, or nothing."""
        known = {row.digest for row in self.rows()}
        for path in sorted(self._entries.glob("*/*.safetensors")):
            digest = path.stem
            known.discard(digest)
            try:
                held = parse(path.read_bytes(), None)
                problem = "" if held.digest == digest else "it lies under another's name"
                if not problem and self.look_up(digest) is None:
                    problem = "the index does not know it"
            except Damaged as error:
                problem = str(error)
            except FileNotFoundError:
                continue  # someone else has just removed it
            except OSError as error:
                problem = f"it cannot be read: {error}"
            yield digest, problem
        for digest in sorted(known):
            yield digest, "its file is missing"

    def prune(self, *, max_bytes: int | None = None, older_than: float | None = None) -> int:
        """Remove entries, the least recently used first; gives how many.

        Parameters
        ----------
        max_bytes : int
            Until all entries have at most so many bytes.
        older_than : float
            All that were made more than so many seconds ago.
        """
        gone = 0
        total = self.nbytes
        for row in reversed(self.rows()):
            old = older_than is not None and time.time() - row.made > older_than
            if old or (max_bytes is not None and total > max_bytes):
                self.remove(row.digest)
                total -= row.bytes
                gone += 1
        return gone
