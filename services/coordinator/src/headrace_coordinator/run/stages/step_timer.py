"""Where the time of a step goes: intervals by stage and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

Interval = tuple[float, float]
NO_DEVICE = ""
SPANS_KEPT = 32
WAIT_LEASE = "wait for lease"


class StepTimer:
    """Intervals of one step on one clock, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forgets everything: the next step begins now."""
        self._started = self._clock()
        self._stages: dict[str, list[Interval]] = defaultdict(list)
        self._devices: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))

    @contextmanager
    def stage(self, name: str, devices: Iterable[str] = ()) -> Iterator[None]:
        """Times the body as `name`, on `devices`."""
        start = self._clock()
        try:
            yield
        finally:
            for part in without((start, self._clock()), self._stages.get(WAIT_LEASE, ())):
                self.add(name, part, devices)

    def waited(self, interval: Interval, devices: Iterable[str]) -> None:
        """Time in the line for devices that other runs share; no stage that is being timed counts it too."""
        self.add(WAIT_LEASE, interval, devices)

    def add(self, name: str, interval: Interval, devices: Iterable[str] = ()) -> None:
        """Adds an interval that was measured elsewhere."""
        self._stages[name].append(interval)
        for device in tuple(devices) or (NO_DEVICE,):
            self._devices[device][name].append(interval)

    @property
    def wall(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def stages(self) -> dict[str, float]:
        """Seconds by stage (overlaps within a stage count once); `protocol` is the time covered by none."""
        seconds = {name: covered(intervals) for name, intervals in self._stages.items()}
        everything = [interval for intervals in self._stages.values() for interval in intervals]
        seconds["protocol"] = max(0.0, self.wall - covered(everything))
        return seconds

    def after(self, name: str, other: str) -> float:
        """Seconds of a stage from the last end of another one on."""
        end = max((stop for _, stop in self._stages.get(other, ())), default=self._started)
        return covered((max(start, end), stop) for start, stop in self._stages.get(name, ()) if stop > end)

    def devices(self) -> dict[str, dict[str, float]]:
        """Seconds by device and stage."""
        return {
            device: {name: covered(intervals) for name, intervals in stages.items()}
            for device, stages in self._devices.items()
            if device != NO_DEVICE
        }

    @property
    def started(self) -> float:
        """When it began, on its clock."""
        return self._started

    def spans(self) -> list[tuple[str, list[str], float, float]]:
        """(stage, devices, start, end) on its clock, in order; at most SPANS_KEPT of a stage on a device.

        Devices that worked at the same time share a span; work that needs no device has none.
        """
        found: dict[tuple[float, float, str], list[str]] = defaultdict(list)
        for device, stages in sorted(self._devices.items()):
            for name, intervals in stages.items():
                for start, stop in joined(intervals, SPANS_KEPT):
                    found[start, stop, name] += [] if device == NO_DEVICE else [device]
        return [(name, devices, start, stop) for (start, stop, name), devices in sorted(found.items())]


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def without(interval: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """What is left of an interval."""
    left, (start, end) = [], interval
    for first, last in sorted(holes):
        if first > start and first < end:
            left.append((start, first))
        start = max(start, last)
    return [*left, (start, end)] if start < end else left


def joined(intervals: Iterable[Interval], most: int) -> list[Interval]:
    """The union of intervals as at most `most` ones: the smallest gaps are closed."""
    union: list[Interval] = []
    for start, stop in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    while len(union) > most:
        gaps = [right[0] - left[1] for left, right in pairwise(union)]
        at = gaps.index(min(gaps))
        union[at : at + 2] = [(union[at][0], union[at + 1][1])]
    return union
