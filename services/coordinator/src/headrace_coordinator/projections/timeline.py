"""The timeline file of a run: which instance held which devices when, and for which stage.

One line for each step, evaluation and leave. Bounded: a full file replaces the one before it, so the oldest part of a
long run is removed. Times are seconds since the epoch. `labelled` gives each device's time one label, as the planner's
simulated cluster does. Knows no lease rule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
from headrace_planner.asynchronous import WAITED, ending_staleness
from headrace_planner.cluster.spans import UNPLANNED, Label
from headrace_schema.resources.overviews import (
    HoldView,
    LabelView,
    TailView,
    TimelinePartView,
    TimelineView,
    WorkView,
)

from headrace_coordinator.domain.intervals import Interval, covered, joined, without
from headrace_coordinator.projections.lines import LineFile, read_lines

NAME, OLD_NAME = "timeline.jsonl", "timeline-old.jsonl"
FILE_BYTES = 2 * 1024 * 1024
MOST_SPANS = 4000
"""Most spans of one answer; more cannot be told apart on a page."""
Kind = Literal["prepare", "step", "skipped", "evaluation", "leave"]
AT_WORK = {
    "learn": Label.TRAIN,
    "help": Label.TRAIN,
    "sync": Label.SYNC,
    "switch": Label.SWITCH,
    "prefill": Label.PREFILL,
    "evaluate": Label.DECODE,
    "generate": Label.DECODE,
    "act": Label.DECODE,
    "wait for lease": Label.WAIT_LEASE,
    "wait for data": Label.WAIT_DATA,
    "wait for tail": Label.WAIT_TAIL,
}
"""Labels by stage; any other stage is `work`. Of stages at work at the same time the first of these gives the label."""
ORDER = {stage: place for place, stage in enumerate(AT_WORK)}
FOR_ALL = ("switch", "sync", "checkpoint")
"""Stages that name no device and occupy all devices of the run."""
DECODES = ("generate", "evaluate")
Moment = tuple[str, Label, str]
"""Stage, label and holder of a device at a time."""


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """An ended lease: `instance` held `devices` for a stage."""

    epoch: int
    instance: str
    stage: str
    devices: list[str]
    start: float
    end: float
    cause: str


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Work of a stage on devices; none for stages that need no device, such as scoring."""

    stage: str
    devices: list[str]
    start: float
    end: float


class Part(msgspec.Struct, frozen=True):
    """A line: what was done since the line before it, and the leases that ended meanwhile."""

    kind: Kind
    step: int
    start: float
    end: float
    work: list[Span]
    holds: list[Hold] = []
    rests: list[Span] = []
    """Times of a stage in which some devices have no work, such as a rollout that waits for the tail of others."""


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Part).decode


class TimelineFile:
    """Appends parts; keeps at most two files of `file_bytes`."""

    def __init__(self, directory: Path, file_bytes: int = FILE_BYTES) -> None:
        self._directory, self._file_bytes = directory, file_bytes
        self._file = LineFile(directory / NAME)

    def append(self, part: Part) -> None:
        """OSError when the disk refuses."""
        if self._file.size() >= self._file_bytes:
            self._file.path.replace(self._directory / OLD_NAME)
            self._file = LineFile(self._directory / NAME)
        self._file.append([encode(part)])


def read_timeline(
    directory: Path,
    steps: int,
    before: float | None = None,
    live: Iterable[HoldView] = (),
    *,
    labels: bool = False,
    max_staleness: int = 0,
) -> TimelineView:
    """The newest `steps` steps that began before a time, and every hold that overlaps them; `live` holds go on.

    Evaluations and leaves between these steps and after the last one come with them. With `labels` each device's time
    in the parts has one label.
    """
    every = [part for name in (OLD_NAME, NAME) for part in _parts(directory / name)]
    known = [part for part in every if before is None or part.start < before]
    chosen = _fitting(_from_step(known, steps))
    holds = [HoldView.of(hold) for part in every for hold in part.holds]
    holds += live
    start = chosen[0].start if chosen else min((hold.start for hold in holds), default=0.0)
    end = chosen[-1].end if before is not None and chosen else None
    shown = [hold for hold in holds if _overlaps(hold, start, end)]
    return TimelineView(
        parts=[TimelinePartView.of(part) for part in chosen],
        work=[WorkView.of(span, step=part.step) for part in chosen for span in part.work],
        holds=sorted(shown, key=lambda hold: hold.start)[-MOST_SPANS:],
        labels=labelled(chosen, holds) if labels else [],
        tail=tail_of(chosen, max_staleness) if max_staleness else None,
        older=len(known) > len(chosen),
    )


def tail_of(parts: Iterable[Part], max_staleness: int) -> TailView | None:
    """The trainer's waits for the tails of the parts that are steps; None where there is none."""
    steps = [
        (part.end - part.start, covered((s.start, s.end) for s in part.work if s.stage == Label.WAIT_TAIL))
        for part in parts
        if part.kind == "step"
    ]
    if not steps:
        return None
    return TailView(
        max_staleness=max_staleness,
        steps=len(steps),
        waited=sum(wait >= WAITED * seconds for seconds, wait in steps if wait),
        longest_s=max(wait for _, wait in steps),
        enough=ending_staleness(steps, max_staleness),
    )


def _from_step(parts: list[Part], steps: int) -> list[Part]:
    """The parts from the `steps`-th last step on; all parts where there are fewer steps."""
    places = [place for place, part in enumerate(parts) if part.kind == "step"]
    return parts[places[-steps] :] if len(places) >= steps > 0 else parts


def _overlaps(hold: HoldView, start: float, end: float | None) -> bool:
    return (hold.end is None or hold.end > start) and (end is None or hold.start < end)


def _fitting(parts: list[Part]) -> list[Part]:
    """The newest of the parts that have at most MOST_SPANS spans together; at least one."""
    total = 0
    for index, part in enumerate(reversed(parts)):
        total += len(part.work)
        if total > MOST_SPANS and index:
            return parts[-index:]
    return parts


def _parts(path: Path) -> list[Part]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return []
    return _read(path, status.st_ino, status.st_size)


@lru_cache(4)
def _read(path: Path, inode: int, size: int) -> list[Part]:
    """The whole lines of a file as it was at that size."""
    found = []
    for _, line in read_lines(path):
        try:
            found.append(_decode(line))
        except msgspec.DecodeError:
            continue  # A torn line; the file's writer has closed it off.
    return found


def labelled(parts: Sequence[Part], holds: Iterable[HoldView]) -> list[LabelView]:
    """Spans of the parts' devices by time: at any time of a part each device is in exactly one of them.

    Devices with the same stage, label and holder at the same time share a span. Prefill counts as decode where an
    engine does not measure it. Work that needs no device, such as scoring, is in spans without devices.
    """
    listed = list(holds)
    devices = sorted({device for hold in listed for device in hold.devices} | _worked(parts))
    held = {device: [hold for hold in listed if device in hold.devices] for device in devices}
    together: dict[tuple[float, float, Moment], list[str]] = defaultdict(list)
    for part in parts:
        within = _LabelledPart(part)
        for device in devices:
            for start, end, moment in within.of(device, held[device]):
                together[start, end, moment].append(device)
        for span in within.nowhere:
            together[span.start, span.end, (span.stage, Label.WORK, "")] += []
    return [
        LabelView(stage=stage, label=label.value, instance=holder, devices=on, start=start, end=end)
        for (start, end, (stage, label, holder)), on in sorted(together.items())
    ]


def _worked(parts: Sequence[Part]) -> set[str]:
    return {device for part in parts for span in part.work for device in span.devices}


class _LabelledPart:
    """Labels the devices' time in one part."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._work = _by_device(part.work)
        self._rests = _by_device(part.rests)
        alone = self._work.pop("", [])
        self._for_all = [span for span in alone if span.stage in FOR_ALL]
        self.nowhere = [span for span in alone if span.stage not in FOR_ALL]
        self._decoding = self._times_of_decoding()

    def of(self, device: str, holds: Sequence[HoldView]) -> Iterator[tuple[float, float, Moment]]:
        """(start, end, moment) of a device, from the part's start to its end; equal neighbours are joined."""
        begin, end = self._part.start, self._part.end
        work = [*self._work.get(device, ()), *self._for_all]
        spans = [*work, *self._rests.get(device, ()), *self.nowhere]
        marks = {begin, end, *(time for span in spans for time in (span.start, span.end))}
        marks |= {time for hold in holds for time in (hold.start, hold.end) if time is not None}
        marks |= {time for one in self._decoding for time in one}
        found: list[tuple[float, float, Moment]] = []
        for start, until in pairwise(sorted(time for time in marks if begin <= time <= end)):
            moment = self._moment(device, (start + until) / 2, holds)
            if found and found[-1][2] == moment:
                found[-1] = found[-1][0], until, moment
            else:
                found.append((start, until, moment))
        yield from found

    def _moment(self, device: str, at: float, holds: Sequence[HoldView]) -> Moment:
        holder = next(
            (hold for hold in holds if hold.start <= at and (hold.end is None or at < hold.end)), None
        )
        name = holder.instance if holder else ""
        stages = {span.stage for span in self._work.get(device, ()) if span.start <= at < span.end}
        if stages.issubset(DECODES) and _covers(self._rests.get(device, ()), at):
            return *self._waits_for(at), name
        if stages:
            stage = min(stages, key=lambda each: ORDER.get(each, len(ORDER)))
            return stage, AT_WORK.get(stage, Label.WORK), name
        for span in self._for_all:
            if span.start <= at < span.end:
                return span.stage, AT_WORK.get(span.stage, Label.WORK), name
        return (holder.stage, Label.WAIT_DATA, name) if holder else (UNPLANNED, Label.WAIT_LEASE, "")

    def _waits_for(self, at: float) -> tuple[str, Label]:
        """The stage, with its label, that a device waits for which has decoded all its sequences."""
        place = bisect_left(self._decoding, (at, at))
        if place and self._decoding[place - 1][1] > at:
            return "generate", Label.WAIT_TAIL
        scoring = next((span.stage for span in self.nowhere if span.start <= at < span.end), None)
        return (scoring, Label.WAIT_REWARD) if scoring else ("generate", Label.WAIT_DATA)

    def _times_of_decoding(self) -> list[Interval]:
        """The times in which some device decodes, joined and in order."""
        return joined(
            piece
            for device, spans in self._work.items()
            for span in spans
            if span.stage in DECODES
            for piece in without(
                (span.start, span.end), [(rest.start, rest.end) for rest in self._rests.get(device, ())]
            )
        )


def _by_device(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        for device in span.devices or [""]:
            found[device].append(span)
    return found


def _covers(spans: Iterable[Span], at: float) -> bool:
    return any(span.start <= at < span.end for span in spans)
