"""A store in memory, for the seeded simulation: same rules, scripted outages, survives its coordinator."""

from __future__ import annotations

import msgspec

from headrace_coordinator.store.base import Entry, Fenced, StoreAway, Stored


class MemoryStore:
    """A `Store` whose reachability a test controls through `away` and `lose_replies`."""

    def __init__(self) -> None:
        self.away = False
        self.lose_replies = False
        self._stored = Stored(store_id="", epoch=0, sequence=0, snapshot=b"", snapshot_sequence=0, events=[])
        self._first = 0

    def _reach(self) -> None:
        if self.away:
            raise StoreAway("scripted outage")

    async def claim(self, identity: str) -> None:
        """See `Store.claim`; a simulated coordinator dies before its successor starts."""
        self._reach()

    async def keep_claim(self) -> None:
        """See `Store.keep_claim`."""
        self._reach()

    async def load(self) -> Stored:
        """See `Store.load`."""
        self._reach()
        stored = self._stored
        return msgspec.structs.replace(stored, events=list(stored.events))

    async def begin(self, epoch: int, store_id: str) -> None:
        """See `Store.begin`."""
        self._reach()
        if self._stored.epoch >= epoch:
            raise Fenced(f"coordinator epoch {self._stored.epoch} has begun")
        self._stored.epoch, self._stored.store_id = epoch, store_id

    async def raise_epoch(self, present: int, epoch: int, store_id: str) -> None:
        """See `Store.raise_epoch`."""
        self._reach()
        if self._stored.epoch not in (present, epoch):
            raise Fenced(f"the active coordinator epoch is {self._stored.epoch}")
        self._stored.epoch = epoch

    async def append(self, epoch: int, expected: int, first: int, entries: list[Entry]) -> None:
        """See `Store.append`."""
        self._reach()
        if epoch != self._stored.epoch:
            raise Fenced(f"the active coordinator epoch is {self._stored.epoch}")
        last = first + len(entries) - 1
        if self._stored.sequence != expected:
            if (self._stored.sequence, self._first) == (last, first):
                return
            raise Fenced(f"the log ends at {self._stored.sequence}, not at {expected}")
        for index, entry in enumerate(entries):
            self._stored.events.append((first + index, entry.payload))
        self._stored.sequence, self._first = last, first
        if self.lose_replies:
            self.lose_replies = False
            raise StoreAway("the reply was lost")

    async def save_snapshot(self, epoch: int, sequence: int, data: bytes) -> None:
        """See `Store.save_snapshot`."""
        self._reach()
        self._stored.snapshot, self._stored.snapshot_sequence = data, sequence
        self._stored.events = [(number, event) for number, event in self._stored.events if number > sequence]

    async def old_runs(self) -> list[str]:
        """See `Store.old_runs`."""
        return []

    async def old_history(self, run: str) -> list[tuple[int, bytes]]:
        """See `Store.old_history`."""
        return []

    async def drop_history(self, run: str) -> None:
        """See `Store.drop_history`."""
