"""Sequences of one replica: continuous batching as processor sharing. Knows no plan."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from headrace_planner.cluster.spans import DeviceTrack
from headrace_planner.profiling.profiles import Pace

Finished = tuple[float, int]
"""(seconds, item)."""


class Replica:
    """Decodes (remaining length, item) pairs from `begin` on, in the given order where not all fit at once.

    Lengths are in mean lengths. `now` is how far its time has come.
    """

    def __init__(self, pace: Pace, begin: float, waiting: Iterable[tuple[float, int]] = ()) -> None:
        self.pace = pace
        self.now = begin
        self.length = 0.0  # what a sequence in flight from the beginning on has decoded
        self._waiting = deque(waiting)
        self._flying: list[tuple[float, int]] = []
        self._fill()

    @property
    def unfinished(self) -> int:
        """Sequences that are in flight or wait."""
        return len(self._flying) + len(self._waiting)

    @property
    def queued(self) -> Iterator[int]:
        """Items that wait for a place."""
        return (item for _, item in self._waiting)

    @property
    def next_end(self) -> float | None:
        """When the next sequence is finished if none comes to it; None with none in flight."""
        if not self._flying:
            return None
        return self.now + (self._flying[0][0] - self.length) * self.pace.seconds(len(self._flying))

    def add(self, sequences: Sequence[tuple[float, int]]) -> None:
        """Takes over (remaining length, item) pairs."""
        self._waiting.extend(sequences)
        self._fill()

    def take(self) -> list[tuple[float, int]]:
        """Removes all unfinished sequences; returns them as (remaining length, item)."""
        given = [(end - self.length, item) for end, item in sorted(self._flying)] + list(self._waiting)
        self._flying.clear()
        self._waiting.clear()
        return given

    def stall(self, seconds: float) -> None:
        """Decodes nothing for some seconds."""
        self.now += seconds

    def run(self, until: float = math.inf) -> list[Finished]:
        """What is finished by `until`, by time; sequences in flight advance as far."""
        finished = []
        while self._flying:
            rate = self.pace.seconds(len(self._flying))
            end = self.now + (self._flying[0][0] - self.length) * rate
            if end > until:
                self.length += max(0.0, until - self.now) / rate
                break
            self.now = end
            self.length, item = heappop(self._flying)
            finished.append((end, item))
            self._fill()
        if math.isfinite(until):
            self.now = max(self.now, until)
        return finished

    def _fill(self) -> None:
        while self._waiting and len(self._flying) < self.pace.concurrency:
            remaining, item = self._waiting.popleft()
            heappush(self._flying, (self.length + remaining, item))


@dataclass
class DecodingDevices:
    """A rollout replica and the devices that it decodes on. `last`: when it finished its last output."""

    name: str
    track: DeviceTrack
    replica: Replica
    owner: bool
    last: float
    finished: int = 0


def spread(items: Sequence[int], replicas: int) -> list[list[int]]:
    """Items dealt out to replicas in turn, as they are at a step's begin."""
    return [list(items[index::replicas]) for index in range(replicas)]
