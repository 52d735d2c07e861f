"""What every imaginary instance has: a life, leases, a fence."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.common.v1 import common_pb2 as common

from headrace_coordinator.ports import CallRefused


@dataclass
class Instance:
    """What every imaginary instance has: a life, leases, a fence."""

    KIND: ClassVar[str] = ""
    name: str
    incarnation: str
    rng: random.Random
    devices: tuple[str, ...] = ()
    alive: bool = True
    cut_off: bool = False
    coordinator_epoch: int = 0
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)
    deadlines: dict[int, float] = field(default_factory=dict)
    tasks: set[asyncio.Future[Any]] = field(default_factory=set)

    def fence(self, header: common.CommandHeader, *, lease: bool) -> None:
        """Refuses an old coordinator and a lease that is not held."""
        if header.coordinator_epoch < self.coordinator_epoch:
            raise CallRefused(self.incarnation, "EPOCH_STALE", "coordinator epoch")
        self.coordinator_epoch = header.coordinator_epoch
        if lease and header.lease_epoch not in self.live_leases():
            raise CallRefused(self.incarnation, "EPOCH_STALE", f"lease {header.lease_epoch} is not held")

    def live_leases(self) -> set[int]:
        """Leases whose own deadline has not passed: the holder quiesces by its own clock."""
        now = asyncio.get_running_loop().time()
        return {epoch for epoch in self.held if now < self.deadlines.get(epoch, 0.0)}

    def using(self) -> set[str]:
        """Devices that it works on now."""
        return (
            {device for epoch in self.live_leases() for device in self.held[epoch]} if self.alive else set()
        )

    async def handle(self, method: str, request: Any) -> Any:
        """A unary call, killed with the instance."""
        return await self._mortal(getattr(self, method)(request))

    def handle_stream(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """A stream."""
        stream: AsyncIterator[Any] = getattr(self, method)(requests)
        return stream

    async def _mortal(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        try:
            return await task
        finally:
            self.tasks.discard(task)

    def die(self) -> None:
        """SIGKILL."""
        self.alive = False
        for task in self.tasks:
            task.cancel()
