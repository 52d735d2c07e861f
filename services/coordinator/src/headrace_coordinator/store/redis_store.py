"""The event log in Redis (or any server that speaks its protocol). Knows no event's meaning."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError
from typing_extensions import override

from headrace_coordinator.store.base import Fenced, Store, StoreAway, Stored

CLAIM_SECONDS = 15
COMEBACK_S = 7.0
"""Seconds that the last leader, if it may be alive, has to renew a claim that ran out; it tries every second."""
POLL_S = 0.25
PAGE = 1000


class RedisStore(Store):
    """A `Store` on one Redis database; all keys begin with `prefix`."""

    def __init__(self, url: str, prefix: str = "headrace", password: str | None = None) -> None:
        self._redis: Any = Redis.from_url(url, password=password, socket_timeout=5, socket_connect_timeout=2)
        self._prefix = prefix
        self._identity = ""
        self._epoch = 0
        self._append_if = self._script("append_if.lua")
        self._claim = self._script("claim.lua")
        self._set_epoch = self._script("set_epoch.lua")

    def _script(self, name: str) -> Any:
        text = files("headrace_coordinator.store").joinpath(name).read_text()
        return self._redis.register_script(text)

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    @override
    async def claim(self, identity: str) -> None:
        """Replaces a leader at once whose process was on this host and is gone.

        A claim that ran out while the store refused writes does not show that its leader is gone: the last leader gets
        `COMEBACK_S` to renew it, counted from a write that was accepted.
        """
        record = json.dumps({"who": identity, "host": socket.gethostname(), "pid": os.getpid()})
        leader = await self._leader()
        if not leader and _may_live(await self._last_leader(), record):
            await self._ask(self._redis.hset(self._key("meta"), "candidate", record))
            leader = await self._comeback()
        if _may_live(leader, record):
            raise Fenced(_named(leader))
        await self._hold(record, leader, "")
        self._identity = record

    async def _comeback(self) -> str:
        for _ in range(round(COMEBACK_S / POLL_S)):
            await asyncio.sleep(POLL_S)
            if leader := await self._leader():
                return leader
        return ""

    async def _leader(self) -> str:
        return _text(await self._ask(self._redis.get(self._key("leader"))))

    async def _last_leader(self) -> str:
        return _text(await self._ask(self._redis.hget(self._key("meta"), "leader")))

    @override
    async def keep_claim(self) -> None:
        await self._hold(self._identity, self._identity, str(self._epoch))

    async def _hold(self, identity: str, replaced: str, epoch: str) -> None:
        keys = [self._key("leader"), self._key("meta")]
        await self._ask(self._claim(keys=keys, args=[identity, replaced, str(CLAIM_SECONDS), epoch]))

    @override
    async def load(self) -> Stored:
        meta = await self._ask(self._redis.hgetall(self._key("meta")))
        snapshot = await self._ask(self._redis.hgetall(self._key("snapshot")))
        after = int(snapshot.get(b"sequence", b"0"))
        return Stored(
            store_id=meta.get(b"store_id", b"").decode(),
            epoch=int(meta.get(b"epoch", b"0")),
            sequence=int(meta.get(b"sequence", b"0")),
            snapshot=snapshot.get(b"data", b""),
            snapshot_sequence=after,
            events=await self._read(after),
        )

    @override
    async def begin(self, epoch: int, store_id: str) -> None:
        await self._make_active("", epoch, store_id)

    @override
    async def raise_epoch(self, present: int, epoch: int, store_id: str) -> None:
        await self._make_active(str(present), epoch, store_id)

    async def _make_active(self, present: str, epoch: int, store_id: str) -> None:
        await self._ask(self._set_epoch(keys=[self._key("meta")], args=[present, str(epoch), store_id]))
        self._epoch = epoch

    @override
    async def append(self, epoch: int, expected: int, first: int, payloads: list[bytes]) -> None:
        keys = [self._key("meta"), self._key("log")]
        arguments: list[Any] = [str(epoch), str(expected), str(first), *payloads]
        await self._ask(self._append_if(keys=keys, args=arguments))

    @override
    async def save_snapshot(self, epoch: int, sequence: int, data: bytes) -> None:
        if int(await self._ask(self._redis.hget(self._key("meta"), "epoch")) or 0) != epoch:
            raise Fenced("another coordinator epoch has begun")
        mapping = {"sequence": str(sequence), "data": data}
        await self._ask(self._redis.hset(self._key("snapshot"), mapping=mapping))
        await self._ask(self._redis.xtrim(self._key("log"), minid=f"{sequence + 1}-0", approximate=False))

    async def close(self) -> None:
        """Releases the claim and closes the connections."""
        try:
            if await self._leader() == self._identity:
                await self._redis.delete(self._key("leader"))
                await self._redis.hdel(self._key("meta"), "leader")
            await self._redis.aclose()
        except (RedisError, StoreAway):
            return  # The claim runs out by itself.

    async def _read(self, after: int) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        while True:
            page = await self._ask(self._redis.xrange(self._key("log"), min=f"({after}-0", count=PAGE))
            found += [(int(key.split(b"-")[0]), fields[b"e"]) for key, fields in page]
            if len(page) < PAGE:
                return found
            after = found[-1][0]

    async def _ask(self, reply: Awaitable[Any]) -> Any:
        """Waits for a reply. Every error but FENCED is `StoreAway`: out of memory, MISCONF, READONLY, LOADING, …."""
        try:
            answer = await reply
        except ResponseError as error:
            if "FENCED" in str(error):
                raise Fenced(str(error)) from error
            raise StoreAway(f"it refuses: {error}") from error
        except (RedisError, OSError) as error:
            raise StoreAway(f"{type(error).__name__}: {error}") from error
        # Python 3.11's wait_for, which the client uses, loses a cancellation that meets its result.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError
        return answer


def _text(reply: bytes | None) -> str:
    return (reply or b"").decode()


def _may_live(leader: str, own: str) -> bool:
    return bool(leader) and leader != own and not _is_gone(json.loads(leader))


def _named(record: str) -> str:
    leader = json.loads(record)
    return (
        f"another coordinator leads this store: {leader.get('who')} "
        f"(pid {leader.get('pid')} on {leader.get('host')}); stop it, or use another store"
    )


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
