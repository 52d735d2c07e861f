"""Runs samples in the environments of a stream, one at a time in each; what a sample does there is a subclass's affair.

Knows no gRPC call of its own and no trajectory.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from headrace.rollout.v1 import rollout_pb2

from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import SlotKey
from headrace_rollout.environments.pool import Environment, Pool


class Started(Protocol):
    """A sample that begins with an environment's reset."""

    @property
    def key(self) -> SlotKey: ...

    @property
    def start(self) -> rollout_pb2.EpisodeStart: ...


SampleT = TypeVar("SampleT", bound=Started)
EndedT = TypeVar("EndedT")


@dataclass
class _Queue(Generic[SampleT]):
    """Samples of one task that have no environment yet."""

    samples: deque[SampleT] = field(default_factory=deque)
    filled: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, sample: SampleT) -> None:
        self.samples.append(sample)
        self.filled.set()

    def take(self) -> SampleT | None:
        found = self.samples.popleft() if self.samples else None
        if not self.samples:
            self.filled.clear()
        return found


class EnvironmentRunner(ABC, Generic[SampleT, EndedT]):
    """The samples of one stream; `pool_lost` is called with each pool that answers no more."""

    def __init__(self, pools: Sequence[Pool], pool_lost: Callable[[Pool], None]) -> None:
        self._pool_lost = pool_lost
        self._queues: dict[str, _Queue[SampleT]] = {pool.task: _Queue() for pool in pools}
        self._running: dict[asyncio.Task[EndedT], SampleT] = {}
        self._any_lost = False
        self._tasks = [asyncio.create_task(self._watch(pool), name=f"watch {pool.name}") for pool in pools]
        for pool in pools:
            self._tasks += [asyncio.create_task(self._serve(pool, each)) for each in pool.environments]

    @abstractmethod
    async def _play(self, sample: SampleT, environment: Environment) -> EndedT:
        """What a sample comes to in an environment. Raises nothing but CancelledError."""

    @abstractmethod
    def _stopped(self, sample: SampleT) -> EndedT:
        """What a sample comes to that was stopped before its end."""

    @abstractmethod
    def _emit(self, ended: EndedT) -> None:
        """Sends what a sample came to."""

    @property
    def living(self) -> int:
        """Samples that run or wait."""
        return len(self._running) + sum(len(queue.samples) for queue in self._queues.values())

    def check(self, samples: Sequence[SampleT]) -> None:
        """Raises Refused INVALID for a task that no pool has."""
        for sample in samples:
            if sample.start.task not in self._queues:
                have = ", ".join(sorted(self._queues))
                raise Refused(
                    "INVALID", f"episode.task: no pool has {sample.start.task!r}; pools have {have}"
                )

    def submit(self, samples: Sequence[SampleT], *, accept: bool = True) -> None:
        """Queues samples in order; without `accept`, or after a pool was lost, they come back at once."""
        for sample in samples:
            if accept and not self._any_lost:
                self._queues[sample.start.task].put(sample)
            else:
                self._emit(self._stopped(sample))

    def stop(self, keys: Sequence[SlotKey] | None) -> int:
        """Stops samples (None: all), which come back as stopped; returns how many."""
        wanted = None if keys is None else set(keys)
        running = [task for task, sample in self._running.items() if wanted is None or sample.key in wanted]
        for task in running:
            self._end(task)
        return len(running) + self._return_waiting(wanted)

    async def close(self) -> None:
        """Stops everything and ends."""
        self.stop(None)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._running, return_exceptions=True)

    def _return_waiting(self, wanted: set[SlotKey] | None) -> int:
        count = 0
        for queue in self._queues.values():
            waiting = [queue.take() for _ in range(len(queue.samples))]
            for sample in waiting:
                assert sample is not None
                if wanted is None or sample.key in wanted:
                    count += 1
                    self._emit(self._stopped(sample))
                else:
                    queue.put(sample)
        return count

    async def _watch(self, pool: Pool) -> None:
        await pool.lost.wait()
        # What waits is assigned elsewhere; what runs in other pools ends.
        self._any_lost = True
        self._pool_lost(pool)
        self._return_waiting(None)

    async def _serve(self, pool: Pool, environment: Environment) -> None:
        queue = self._queues[pool.task]
        while not pool.reason:
            await queue.filled.wait()
            async with environment.turn:
                sample = None if pool.reason else queue.take()
                if sample is not None:
                    await self._run(sample, environment)

    async def _run(self, sample: SampleT, environment: Environment) -> None:
        playing = asyncio.create_task(self._play(sample, environment))
        self._running[playing] = sample
        try:
            await asyncio.wait([playing])
        finally:
            self._end(playing)

    def _end(self, playing: asyncio.Task[EndedT]) -> None:
        """Sends what a sample came to, once: what was played, or that it was stopped."""
        sample = self._running.pop(playing, None)
        if sample is not None:
            stopped = not playing.done() or playing.cancelled()
            playing.cancel()
            self._emit(self._stopped(sample) if stopped else playing.result())
