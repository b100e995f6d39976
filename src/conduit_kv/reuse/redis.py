"""The Redis tier: entries on another machine, which may be slow or away."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

from conduit_kv.errors import InputError
from conduit_kv.reuse.keys import Key

_PREFIX = "conduit-kv:"
_PAUSE = 5.0
"""Seconds during which a server that did not answer is left alone."""


class RedisTier:
    """Entries in Redis or Valkey, under the server's own memory limit.

    A server that does not answer within the timeout is a miss, and is left alone for a while.

    Parameters
    ----------
    client : str or client
        ``"redis://host:port/0"``, or a client of redis-py, whose timeouts are its own.
    timeout : float
        Seconds.
    """

    name: Literal["redis"] = "redis"

    def __init__(self, client: Any, timeout: float) -> None:
        try:
            import redis
        except ImportError:
            raise InputError(
                "a Redis tier needs redis-py: pip install 'conduit-kv[redis]'"
            ) from None
        self._error = redis.RedisError
        if isinstance(client, str):
            try:
                client = redis.Redis.from_url(
                    client, socket_timeout=timeout, socket_connect_timeout=timeout
                )
            except ValueError as error:
                raise InputError(f"{client!r} is no address of a Redis server: {error}") from None
        self._client = client
        self._away_until = 0.0

    def _ask(self, command: str, *arguments: Any) -> Any:
        if time.monotonic() < self._away_until:
            raise OSError("the server did not answer a moment ago")
        try:
            return getattr(self._client, command)(*arguments)
        except (self._error, OSError) as error:
            self._away_until = time.monotonic() + _PAUSE
            raise OSError(f"the server does not answer: {error}") from None

    def look_up(self, digest: str) -> tuple[int, float] | None:
        """Bytes of an entry and the seconds it took to compute; None if it is not there."""
        size, filled = self._ask("hmget", _PREFIX + digest, ["bytes", "seconds"])
        return None if size is None else (int(size), float(filled or 0))

    def read(self, digest: str) -> bytes | None:
        """An entry's bytes."""
        data: bytes | None = self._ask("hget", _PREFIX + digest, "data")
        return data

    def write(self, key: Key, seconds: float, data: bytes) -> None:
        """Store an entry's bytes."""
        fields = {"bytes": len(data), "seconds": repr(seconds), "data": data}
        fields["tenant"] = json.dumps(key.tenant)
        try:
            if time.monotonic() < self._away_until:
                raise OSError("the server did not answer a moment ago")
            self._client.hset(_PREFIX + key.digest, mapping=fields)
        except self._error as error:
            self._away_until = time.monotonic() + _PAUSE
            raise OSError(f"the server does not answer: {error}") from None

    def remove(self, digest: str) -> None:
        """Remove an entry."""
        try:
            self._ask("delete", _PREFIX + digest)
        except OSError:
            return  # it is away, and so is the entry

    def clear(self) -> None:
        """Remove all entries of Conduit."""
        for name in self._client.scan_iter(_PREFIX + "*"):
            self._ask("delete", name)
