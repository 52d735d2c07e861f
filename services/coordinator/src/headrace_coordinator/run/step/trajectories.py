"""Bodies on their way from producers to the trainer: bounded by bytes, verified by digest.

Keeps nothing for long: what does not fit stays with its producer and is fetched when it is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from headrace.common.v1 import common_pb2 as common
from headrace_servicekit.rpc.digests import digest_and_size

from headrace_coordinator.domain.ledger.slot_index import Slot
from headrace_coordinator.run.workers.clients import SlotKey
from headrace_coordinator.run.workers.rollout_client import RolloutClient

SizedBody = tuple[common.Trajectory, int]


class Relay:
    """Bodies in flight by slot, at most `limit_bytes` of them."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bodies: dict[SlotKey, SizedBody] = {}
        self._used = 0
        self._freed = asyncio.Event()
        self.spilled = 0

    @property
    def full(self) -> bool:
        """Whether what is kept has reached the limit."""
        return self._used >= self._limit

    async def wait_for_room(self, draining: Callable[[], bool]) -> None:
        """Holds a producer's stream back while the relay is full and the trainer is about to drain it (G7)."""
        while self.full and draining():
            self._freed.clear()
            await self._freed.wait()

    def put(self, slot: SlotKey, body: common.Trajectory, size: int) -> None:
        """Keeps a body of `size` bytes until `drop`; one beyond the limit is left with its producer."""
        self.drop([slot])
        if self._used + size > self._limit:
            self.spilled += 1
            return
        self._bodies[slot] = (body, size)
        self._used += size

    def drop(self, slots: Iterable[SlotKey]) -> None:
        """The trainer has them, or nobody needs them."""
        for slot in slots:
            _, size = self._bodies.pop(slot, (None, 0))
            self._used -= size
        self._freed.set()

    async def bodies(
        self, slots: Iterable[Slot], producers: Iterable[RolloutClient]
    ) -> dict[SlotKey, SizedBody]:
        """Bodies of finished slots with their sizes, fetched from retention where the relay has none.

        Left out are those that nobody has: a producer may hold another attempt, which is another body.
        """
        wanted = {(slot.prompt, slot.sample): slot for slot in slots}
        found = {key: self._bodies[key] for key in wanted if key in self._bodies}
        for producer in producers:
            missing = [key for key in wanted if key not in found]
            for body in await producer.fetch(missing) if missing else ():
                slot = wanted[body.sample.prompt_ordinal, body.sample.sample_index]
                digest, size = digest_and_size(body)
                if (slot.attempt, slot.digest) == (body.attempt, digest):
                    found[slot.prompt, slot.sample] = (body, size)
        return found
