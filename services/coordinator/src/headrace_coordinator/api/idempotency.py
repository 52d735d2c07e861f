"""Idempotency keys: a repeated request gets the answer of the first one with its key, and another one is a conflict."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import events as ev

if TYPE_CHECKING:
    from headrace_coordinator.store.event_log import EventLog


def of_caller(key: str) -> str:
    """The key as it is kept: a key is of who used it, and nobody finds another one's."""
    return f"{CALLER.get().name}/{key}"


class Keys:
    """The keys of writes, each with a digest of its request and the resource that the request made."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._locks: dict[str, asyncio.Lock] = {}

    @contextlib.asynccontextmanager
    async def held(self, key: str) -> AsyncIterator[None]:
        """Requests with one key go one after the other: the second finds what the first has recorded."""
        key = of_caller(key)
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._locks.pop(key, None)

    def made(self, key: str, body: str) -> str:
        """What the first request with this key made; empty for a new key. CONFLICT for another request."""
        record = self._event_log.state.key(of_caller(key), self._event_log.now())
        if record is None:
            return ""
        if record.body != body:
            raise conflict(key)
        return record.resource

    def used(self, key: str, body: str, resource: str) -> ev.KeyUsed:
        """The event that records a key, to be committed together with what the request makes."""
        return ev.KeyUsed(key=of_caller(key), body=body, resource=resource)


def conflict(key: str) -> Refused:
    """The refusal of a key that another request has used."""
    return Refused("CONFLICT", f"Idempotency-Key {key} was used for another request; use a new key")


def digest(request: object) -> str:
    """32 hex digits that stand for a request."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:32]
