"""A store that keeps its whole log, also what a snapshot makes superfluous, so that it can be judged afterwards."""

from __future__ import annotations

from headrace_coordinator.domain import events as ev
from headrace_coordinator.store.memory_store import MemoryStore


class RecordingStore(MemoryStore):
    """A `MemoryStore`; `log` has every event that was ever appended, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[ev.Event] = []

    async def append(self, epoch: int, expected: int, first: int, payloads: list[bytes]) -> None:
        """See `Store.append`."""
        before = self._stored.sequence
        try:
            await super().append(epoch, expected, first, payloads)
        finally:
            if self._stored.sequence != before:
                self.log += [ev.decode(payload) for payload in payloads]
