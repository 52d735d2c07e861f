"""Where the time of a step goes: intervals by stage and device, and what its stages say beside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from headrace_coordinator.domain.intervals import Interval, covered, joined, without

NO_DEVICE = ""
GENERATE, SCORE = "generate", "score"
GENERATE_OPEN = "generate_open_seconds"
"""A step's figure: time in which rollouts generated, or waited for what was made of their answers."""
SPANS_KEPT = 32
WAIT_LEASE = "wait for lease"
WAIT_DATA, WAIT_TAIL = "wait for data", "wait for tail"
"""The trainer group has nothing to learn: some answers of its step were not started yet, or all were."""


class StepTimer:
    """Intervals of one step on one clock, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forgets every interval: the next step begins now."""
        self._started = self._clock()
        self.figures: defaultdict[str, float] = defaultdict(float)
        """Sums of what stages tell of themselves, by name."""
        self._devices: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
        self._rests: dict[str, list[Interval]] = defaultdict(list)

    @contextmanager
    def stage(self, name: str, devices: Iterable[str] = ()) -> Iterator[None]:
        """Times the body as `name`, on `devices`."""
        start = self._clock()
        try:
            yield
        finally:
            for part in without((start, self._clock()), self._intervals(WAIT_LEASE)):
                self.add(name, part, devices)

    def waited(self, interval: Interval, devices: Iterable[str]) -> None:
        """Adds time spent waiting for devices that other runs share; stages that are being timed then leave it out."""
        self.add(WAIT_LEASE, interval, devices)

    def add(self, name: str, interval: Interval, devices: Iterable[str] = ()) -> None:
        """Adds an interval that was measured elsewhere."""
        for device in tuple(devices) or (NO_DEVICE,):
            self._devices[device][name].append(interval)

    def rested(self, interval: Interval, devices: Iterable[str]) -> None:
        """Marks an interval in which the devices had nothing to generate; while answers are scored, it is not that
        stage's time.
        """
        for device in devices:
            self._rests[device].append(interval)

    @property
    def wall(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def stages(self) -> dict[str, float]:
        """Seconds by stage (overlaps within a stage count once); `protocol` is the time covered by none."""
        names = dict.fromkeys(name for stages in self._devices.values() for name in stages)
        found = {name: self._intervals(name) for name in names}
        everything = [interval for intervals in found.values() for interval in intervals]
        seconds = {name: covered(intervals) for name, intervals in found.items()}
        return {**seconds, "protocol": max(0.0, self.wall - covered(everything))}

    def after(self, name: str, other: str) -> float:
        """Seconds of a stage from the last end of another one on."""
        end = max((stop for _, stop in self._intervals(other)), default=self._started)
        return covered((max(start, end), stop) for start, stop in self._intervals(name) if stop > end)

    def worked(self, name: str) -> float:
        """Seconds of a stage without those in which its devices had nothing to do, in the mean over them."""
        found = [
            max(0.0, covered(stages[name]) - covered(self._rests[device]))
            for device, stages in self._devices.items()
            if device != NO_DEVICE and name in stages
        ]
        return sum(found) / len(found) if found else 0.0

    def open(self, name: str) -> float:
        """Seconds of a stage with those in which its devices waited."""
        return covered(each for stages in self._devices.values() for each in stages.get(name, ()))

    def devices(self) -> dict[str, dict[str, float]]:
        """Seconds by device and stage."""
        return {
            device: {name: covered(self._of(device, name)) for name in stages}
            for device, stages in self._devices.items()
            if device != NO_DEVICE
        }

    def _of(self, device: str, name: str) -> list[Interval]:
        """A device's intervals of a stage. A rollout that waits while answers are scored generates nothing."""
        intervals = self._devices[device].get(name, [])
        rests = self._rests.get(device) if name == GENERATE else None
        if not rests:
            return intervals
        scoring = [each for stages in self._devices.values() for each in stages.get(SCORE, ())]
        for_scores = [part for rest in rests for part in without(rest, without(rest, scoring))]
        return [part for each in intervals for part in without(each, for_scores)]

    def _intervals(self, name: str) -> list[Interval]:
        return [interval for device in self._devices for interval in self._of(device, name)]

    @property
    def started(self) -> float:
        """When it began, on its clock."""
        return self._started

    def spans(self) -> list[tuple[str, list[str], float, float]]:
        """(stage, devices, start, end) on its clock, in order; at most SPANS_KEPT of a stage on a device.

        Devices that worked at the same time share a span; work that needs no device has none.
        """
        return _together(
            {
                device: {name: self._of(device, name) for name in found}
                for device, found in self._devices.items()
            }
        )

    def rests(self) -> list[tuple[str, list[str], float, float]]:
        """The same for the intervals in which devices had nothing to do; without a stage."""
        return _together({device: {"": intervals} for device, intervals in self._rests.items()})


def _together(
    devices: Mapping[str, Mapping[str, list[Interval]]],
) -> list[tuple[str, list[str], float, float]]:
    found: dict[tuple[float, float, str], list[str]] = defaultdict(list)
    for device, stages in sorted(devices.items()):
        for name, intervals in stages.items():
            for start, stop in joined(intervals, SPANS_KEPT):
                found[start, stop, name] += [] if device == NO_DEVICE else [device]
    return [(name, on, start, stop) for (start, stop, name), on in sorted(found.items())]
