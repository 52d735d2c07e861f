"""A store in memory, for the seeded simulation and tests: same rules, scripted outages, survives its coordinator."""

from __future__ import annotations

import msgspec
from typing_extensions import override

from headrace_coordinator.store.base import Fenced, Store, StoreAway, Stored


class MemoryStore(Store):
    """A `Store` whose reachability a test controls through `away` and `lose_replies`."""

    def __init__(self) -> None:
        self.away = False
        self.lose_replies = False
        self._stored = Stored(store_id="", epoch=0, sequence=0, snapshot=b"", snapshot_sequence=0, events=[])
        self._first = 0

    def _reach(self) -> None:
        if self.away:
            raise StoreAway("scripted outage")

    @override
    async def claim(self, identity: str) -> None:
        """Does nothing: a simulated coordinator dies before its successor starts."""
        self._reach()

    @override
    async def keep_claim(self) -> None:
        self._reach()

    @override
    async def load(self) -> Stored:
        self._reach()
        stored = self._stored
        return msgspec.structs.replace(stored, events=list(stored.events))

    @override
    async def begin(self, epoch: int, store_id: str) -> None:
        self._reach()
        if self._stored.epoch >= epoch:
            raise Fenced(f"coordinator epoch {self._stored.epoch} has begun")
        self._stored.epoch, self._stored.store_id = epoch, store_id

    @override
    async def raise_epoch(self, present: int, epoch: int, store_id: str) -> None:
        self._reach()
        if self._stored.epoch not in (present, epoch):
            raise Fenced(f"the active coordinator epoch is {self._stored.epoch}")
        self._stored.epoch = epoch

    @override
    async def append(self, epoch: int, expected: int, first: int, payloads: list[bytes]) -> None:
        self._reach()
        if epoch != self._stored.epoch:
            raise Fenced(f"the active coordinator epoch is {self._stored.epoch}")
        last = first + len(payloads) - 1
        if self._stored.sequence != expected:
            if (self._stored.sequence, self._first) == (last, first):
                return
            raise Fenced(f"the log ends at {self._stored.sequence}, not at {expected}")
        self._stored.events.extend(enumerate(payloads, first))
        self._stored.sequence, self._first = last, first
        if self.lose_replies:
            self.lose_replies = False
            raise StoreAway("the reply was lost")

    @override
    async def save_snapshot(self, epoch: int, sequence: int, data: bytes) -> None:
        self._reach()
        self._stored.snapshot, self._stored.snapshot_sequence = data, sequence
        self._stored.events = [(number, event) for number, event in self._stored.events if number > sequence]
