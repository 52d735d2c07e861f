"""Who held which devices when, for which stage and with what label. Knows no plan and no cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

UNPLANNED = "-"
"""Stage of devices that no stage holds."""


class Label(StrEnum):
    """What a device does in a span of time."""

    DECODE = "decode"
    PREFILL = "prefill"
    TRAIN = "train"
    WORK = "work"
    SYNC = "sync"
    SWITCH = "switch"
    WAIT_DATA = "wait for data"
    WAIT_REWARD = "wait for reward"
    WAIT_TAIL = "wait for tail"
    WAIT_LEASE = "wait for lease"


@dataclass(frozen=True, slots=True)
class Place:
    """Devices `first` to `first + count - 1` of a kind."""

    kind: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Span:
    """Devices of one place from `begin` to `end` (seconds). `items`: what the stage did of a step's items in it."""

    begin: float
    end: float
    place: Place
    stage: str
    label: Label
    items: float = 0.0

    @property
    def device_seconds(self) -> float:
        """Seconds times devices."""
        return (self.end - self.begin) * self.place.count


@dataclass(frozen=True)
class Timeline:
    """Spans in the order in which they were added. Every device has exactly one label at any time."""

    spans: list[Span] = field(default_factory=list)

    def add(
        self, place: Place, begin: float, end: float, stage: str, label: Label, items: float = 0.0
    ) -> None:
        """Adds a span unless it is empty."""
        if place.count and end > begin:
            self.spans.append(Span(begin, end, place, stage, label, items))

    def add_all(self, places: Sequence[Place], begin: float, end: float, stage: str, label: Label) -> None:
        """Adds the same span for several places."""
        for place in places:
            self.add(place, begin, end, stage, label)

    def device_seconds(self) -> dict[tuple[str, Label], float]:
        """Device-seconds by stage and label, sorted."""
        found: defaultdict[tuple[str, Label], float] = defaultdict(float)
        for span in self.spans:
            found[span.stage, span.label] += span.device_seconds
        return dict(sorted(found.items()))

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline as a Chrome trace (chrome://tracing, Perfetto): a process a kind, a thread a first device."""
        return {"displayTimeUnit": "ms", "traceEvents": [_event(span) for span in self.spans]}


class DeviceTrack:
    """Adjacent devices whose labels follow one another without gaps."""

    def __init__(self, place: Place, timeline: Timeline, begin: float) -> None:
        self.place, self.timeline, self.now = place, timeline, begin

    def until(self, when: float, stage: str, label: Label, items: float = 0.0) -> None:
        """Labels the devices from where the last label ended."""
        if when > self.now:
            self.timeline.add(self.place, self.now, when, stage, label, items)
            self.now = when


def by_label(found: Mapping[tuple[str, Label], float]) -> dict[Label, float]:
    """Device-seconds by label alone, of those that occur."""
    total: defaultdict[Label, float] = defaultdict(float)
    for (_, label), value in found.items():
        total[label] += value
    return {label: total[label] for label in Label if label in total}


def _event(span: Span) -> dict[str, Any]:
    place = span.place
    return {
        "name": f"{span.stage}: {span.label}",
        "cat": span.label.value,
        "ph": "X",
        "ts": round(span.begin * 1e6),
        "dur": round((span.end - span.begin) * 1e6),
        "pid": place.kind,
        "tid": place.first,
        "args": {"devices": place.count, "items": span.items},
    }
