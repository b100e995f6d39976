"""The Redis tier, on a server that the tests start."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conduit_kv import InputError, Store
from tests.reuse.test_store import entry_of, key_of, same

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = pytest.mark.skipif(
    SERVER is None, reason="redis-server is not installed: apt-get install redis-server"
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    redis = pytest.importorskip("redis", reason="redis-py is not installed")
    port = free_port()
    server = subprocess.Popen(
        [str(SERVER), "--port", str(port), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    client = redis.Redis(port=port)
    for _ in range(200):
        try:
            client.ping()
            break
        except redis.ConnectionError:
            time.sleep(0.05)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        server.wait()


def test_what_one_machine_stores_another_finds(address: str, tmp_path: Path) -> None:
    one = Store(redis=address, timeout=5)
    key = key_of()
    one.put(key, entry_of(key))
    other = Store(tmp_path / "disk", redis=address, timeout=5)
    for tier in ("redis", "memory"):
        found = other.get(key)
        assert found is not None
        assert found.tier == tier
        assert same(found.entry, entry_of(key))
    assert other.disk is not None
    assert other.disk.look_up(key.digest) is not None  # it came up to the disk
    assert Store(redis=address, tenant="other", timeout=5).get(key_of(tenant="other")) is None


def test_a_damaged_value_is_a_miss_and_is_removed(address: str) -> None:
    import redis

    one = Store(redis=address, timeout=5)
    key = key_of()
    one.put(key, entry_of(key))
    client = redis.Redis.from_url(address)
    name = f"conduit-kv:{key.digest}"
    data = bytearray(client.hget(name, "data"))
    data[-5] ^= 1
    client.hset(name, "data", bytes(data))
    other = Store(redis=address, timeout=5)
    assert other.get(key) is None
    assert any("checksum" in note for note in other.notes)
    assert not client.exists(name)


def test_a_server_that_is_slow_or_gone_is_a_miss_within_the_timeout(address: str) -> None:
    import redis

    key = key_of()
    Store(redis=address, timeout=5).put(key, entry_of(key))
    store = Store(redis=address, timeout=0.2)
    redis.Redis.from_url(address).client_pause(3000, all=True)
    start = time.perf_counter()
    assert store.get(key) is None
    first = time.perf_counter() - start
    start = time.perf_counter()
    assert store.get(key) is None  # and it is not asked again at once
    second = time.perf_counter() - start
    assert first < 2.0
    assert second < 0.1
    assert any("does not answer" in note for note in store.notes)


def test_nobody_there_is_a_miss() -> None:
    pytest.importorskip("redis", reason="redis-py is not installed")
    store = Store(redis=f"redis://127.0.0.1:{free_port()}/0")
    key = key_of()
    store.put(key, entry_of(key))
    found = store.get(key)
    assert found is not None
    assert found.tier == "memory"
    assert store.get(key_of(1)) is None


def test_an_address_that_is_none_is_named() -> None:
    pytest.importorskip("redis", reason="redis-py is not installed")
    with pytest.raises(InputError, match="no address"):
        Store(redis="ftp://nowhere")
