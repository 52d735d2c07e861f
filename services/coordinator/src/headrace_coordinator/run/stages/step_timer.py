"""Where the time of a step goes: intervals by stage and device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

Interval = tuple[float, float]


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
            self.add(name, (start, self._clock()), devices)

    def add(self, name: str, interval: Interval, devices: Iterable[str] = ()) -> None:
        """Adds an interval that was measured elsewhere."""
        self._stages[name].append(interval)
        for device in devices:
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

    def devices(self) -> dict[str, dict[str, float]]:
        """Seconds by device and stage."""
        return {
            device: {name: covered(intervals) for name, intervals in stages.items()}
            for device, stages in self._devices.items()
        }


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
