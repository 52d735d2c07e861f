"""The event log in Redis (or any server that speaks its protocol). Knows no event's meaning."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Awaitable
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace_coordinator.store.base import Entry, Fenced, StoreAway, Stored

CLAIM_SECONDS = 15
PAGE = 1000


class RedisStore:
    """A `Store` on one Redis database; all keys begin with `prefix`."""

    def __init__(self, url: str, prefix: str = "headrace", password: str | None = None) -> None:
        self._redis: Any = Redis.from_url(url, password=password, socket_timeout=5, socket_connect_timeout=2)
        self._prefix = prefix
        self._identity = ""
        script = files("headrace_coordinator.store").joinpath("append_if.lua").read_text()
        self._append_if = self._redis.register_script(script)

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    async def claim(self, identity: str) -> None:
        """See `Store.claim`. A leader whose process on this host is gone is replaced at once."""
        record = json.dumps({"who": identity, "host": socket.gethostname(), "pid": os.getpid()})
        key = self._key("leader")
        if not await self._ask(self._redis.set(key, record, nx=True, ex=CLAIM_SECONDS)):
            present = json.loads(await self._ask(self._redis.get(key)) or "{}")
            if not _is_gone(present):
                raise Fenced(
                    f"another coordinator leads this store: {present.get('who')} "
                    f"(pid {present.get('pid')} on {present.get('host')}); stop it, or use another store"
                )
            await self._ask(self._redis.set(key, record, ex=CLAIM_SECONDS))
        self._identity = record

    async def keep_claim(self) -> None:
        """See `Store.keep_claim`."""
        key = self._key("leader")
        present = await self._ask(self._redis.get(key))
        if present is not None and present.decode() != self._identity:
            raise Fenced(f"another coordinator took the store: {present.decode()}")
        await self._ask(self._redis.set(key, self._identity, ex=CLAIM_SECONDS))

    async def load(self) -> Stored:
        """See `Store.load`."""
        meta = await self._ask(self._redis.hgetall(self._key("meta")))
        snapshot = await self._ask(self._redis.hgetall(self._key("snapshot")))
        after = int(snapshot.get(b"sequence", b"0"))
        return Stored(
            store_id=meta.get(b"store_id", b"").decode(),
            epoch=int(meta.get(b"epoch", b"0")),
            sequence=int(meta.get(b"sequence", b"0")),
            snapshot=snapshot.get(b"data", b""),
            snapshot_sequence=after,
            events=await self._read(self._key("log"), after),
        )

    async def begin(self, epoch: int, store_id: str) -> None:
        """See `Store.begin`."""
        meta = self._key("meta")
        stored = int(await self._ask(self._redis.hget(meta, "epoch")) or 0)
        if stored >= epoch:
            raise Fenced(f"coordinator epoch {stored} has begun; {epoch} is too late")
        await self._ask(self._redis.hset(meta, mapping={"epoch": str(epoch), "store_id": store_id}))

    async def append(self, epoch: int, expected: int, first: int, entries: list[Entry]) -> None:
        """See `Store.append`."""
        keys = [self._key("meta"), self._key("log")]
        arguments: list[Any] = [str(epoch), str(expected), str(first), *(e.payload for e in entries)]
        try:
            await self._ask(self._append_if(keys=keys, args=arguments))
        except ResponseError as error:
            if "FENCED" in str(error):
                raise Fenced(str(error)) from error
            raise StoreAway(str(error)) from error

    async def save_snapshot(self, epoch: int, sequence: int, data: bytes) -> None:
        """See `Store.save_snapshot`."""
        if int(await self._ask(self._redis.hget(self._key("meta"), "epoch")) or 0) != epoch:
            raise Fenced("another coordinator epoch has begun")
        mapping = {"sequence": str(sequence), "data": data}
        await self._ask(self._redis.hset(self._key("snapshot"), mapping=mapping))
        await self._ask(self._redis.xtrim(self._key("log"), minid=f"{sequence + 1}-0", approximate=False))

    async def old_runs(self) -> list[str]:
        """See `Store.old_runs`."""
        prefix = self._key("run", "")
        found: list[str] = []
        cursor: Any = 0
        while True:
            cursor, keys = await self._ask(self._redis.scan(cursor, match=f"{prefix}*", count=PAGE))
            found += [key.decode().removeprefix(prefix) for key in keys]
            if not int(cursor):
                return sorted(set(found))

    async def old_history(self, run: str) -> list[tuple[int, bytes]]:
        """See `Store.old_history`."""
        return await self._read(self._key("run", run), 0)

    async def drop_history(self, run: str) -> None:
        """See `Store.drop_history`."""
        await self._ask(self._redis.delete(self._key("run", run)))

    async def close(self) -> None:
        """Gives the claim up and closes the connections."""
        try:
            if (await self._redis.get(self._key("leader")) or b"").decode() == self._identity:
                await self._redis.delete(self._key("leader"))
            await self._redis.aclose()
        except RedisError:
            return  # The claim runs out by itself.

    async def _read(self, stream: str, after: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while True:
            page = await self._ask(self._redis.xrange(stream, min=f"({after}-0", count=PAGE))
            found += [(int(key.split(b"-")[0]), fields[b"e"]) for key, fields in page]
            if len(page) < PAGE:
                return found
            after = found[-1][0]

    async def _ask(self, reply: Awaitable[Any]) -> Any:
        try:
            return await reply
        except ResponseError:
            raise
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            raise StoreAway(f"{type(error).__name__}: {error}") from error


def _is_gone(leader: dict[str, Any]) -> bool:
    if leader.get("host") != socket.gethostname():
        return False
    pid = int(leader.get("pid", 0))
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
