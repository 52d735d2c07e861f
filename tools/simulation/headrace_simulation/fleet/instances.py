"""What every simulated instance has: a life, leases, a fence."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_servicekit.lease.open_runs import Build, End, OpeningRefused, OpenRuns
from headrace_servicekit.rpc.streams import until


@dataclass
class Instance:
    """What every simulated instance has: a life, leases, a fence."""

    KIND: ClassVar[str] = ""
    MAX_OPEN_RUNS: ClassVar[int] = 0
    name: str
    incarnation: str
    rng: random.Random
    devices: tuple[str, ...] = ()
    host: str = "host"
    alive: bool = True
    cut_off: bool = False
    stranded: bool = False
    """Its container was removed, and it lives on: nobody reaches it, and what it has of a GPU's memory stays."""
    pace: float = 1.0
    """Factor of the durations that do not depend on the seed."""
    draining: bool = False
    slow: bool = False
    store_id: str = ""
    coordinator_epoch: int = 0
    held: dict[int, tuple[str, ...]] = field(default_factory=dict)
    parts: dict[int, float] = field(default_factory=dict)
    """Of the devices' memory, by the lease's epoch."""
    deadlines: dict[int, float] = field(default_factory=dict)
    revocations: dict[int, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    tasks: dict[asyncio.Future[Any], None] = field(default_factory=dict)
    open_runs: OpenRuns = field(default_factory=OpenRuns)

    def __post_init__(self) -> None:
        self.open_runs.limit = self.MAX_OPEN_RUNS

    def fence(self, header: common.CommandHeader, *, lease: bool, opening: bool = True) -> None:
        """Refuses an old coordinator, another opening, a run that is not open, and a lease that is not held."""
        if header.coordinator_epoch < self.coordinator_epoch:
            raise CallRefused(self.incarnation, "EPOCH_STALE", "coordinator epoch")
        if opening:
            with self._opening_refusals():
                self.open_runs.check(header)
            if header.run not in self.open_runs:
                raise CallRefused(self.incarnation, "NOT_OPEN", f"{header.run} is not open here")
        if lease and header.lease_epoch not in self.live_leases():
            reason = "LEASE_QUIESCED" if header.lease_epoch in self.held else "EPOCH_STALE"
            raise CallRefused(self.incarnation, reason, f"lease {header.lease_epoch} is not held")
        self.coordinator_epoch = header.coordinator_epoch

    async def open_run(self, header: common.CommandHeader, config: object, build: Build, end: End) -> Any:
        """Obeys an OpenRun, by the real instances' rules."""
        self.fence(header, lease=False, opening=False)
        if self.draining:
            raise InstanceDown(self.incarnation, "DRAINING: it was told to stop and opens no run")
        with self._opening_refusals():
            return await self.open_runs.open(header, config, build, end)

    async def close_run(self, header: common.CommandHeader) -> None:
        """Obeys a CloseRun, by the real instances' rules."""
        self.fence(header, lease=False, opening=False)
        await self.open_runs.close(header)

    async def while_open(self, run: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The requests of a stream until its run is closed."""
        closed = asyncio.Event()
        with self.open_runs.until_closed(run, closed.set):
            async for request in until(closed, requests):
                yield request

    @contextmanager
    def _opening_refusals(self) -> Iterator[None]:
        try:
            yield
        except OpeningRefused as refused:
            raise CallRefused(self.incarnation, refused.reason, refused.message) from refused

    def revoke(self, epoch: int, *, keep: bool = False) -> None:
        """Obeys a revoke: the streams under the lease end in order. `keep`: what is on the devices stays."""
        self.held.pop(epoch, None)
        self.revocations[epoch].set()
        if keep:
            self.rested()
        else:
            self.revoked()

    def revoked(self) -> None:
        """A lease is to be released together with what is on its devices."""

    def rested(self) -> None:
        """A lease is to be released while what is on its devices stays."""

    def granted(self) -> None:
        """A lease was granted."""

    def drained(self) -> None:
        """The process is about to end in order."""

    async def take_time(self) -> None:
        """Waits as long as building what a run needs takes; on a slow instance now and then long."""
        quick = not self.slow or self.rng.random() < 0.9
        await asyncio.sleep(self.rng.uniform(0.01, 0.5) if quick else self.rng.uniform(1.0, 45.0))

    def live_leases(self) -> set[int]:
        """Leases whose own deadline has not passed: the holder quiesces by its own clock."""
        now = asyncio.get_running_loop().time()
        return {epoch for epoch in self.held if now < self.deadlines.get(epoch, 0.0)}

    def using(self) -> dict[str, float]:
        """Devices that it works on now, and its part of each."""
        keeps = self.stranded and any("/gpu:" in device for device in self.devices)
        live = (self.held if keeps else self.live_leases()) if self.alive else ()
        return {device: self.parts.get(epoch, 1.0) for epoch in live for device in self.held[epoch]}

    async def handle(self, method: str, request: Any) -> Any:
        """Answers a unary call; the call is cancelled when the instance is killed."""
        response = await self._mortal(getattr(self, method)(request))
        self.open_runs.applied(request.header)
        return response

    def handle_stream(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """A stream."""
        stream: AsyncIterator[Any] = getattr(self, method)(requests)
        return stream

    async def _mortal(self, work: Any) -> Any:
        task = asyncio.ensure_future(work)
        self.tasks[task] = None
        try:
            return await task
        finally:
            del self.tasks[task]

    def die(self) -> None:
        """Ends as by SIGKILL."""
        self.alive = False
        for task in list(self.tasks):
            task.cancel()


async def nothing() -> None:
    """Builds or ends nothing."""
