"""Gives each device's time in a timeline one label, as the planner's simulated cluster does. Pure; knows no file."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from headrace_planner.cluster.spans import UNPLANNED, Label
from headrace_schema.resources.overviews import HoldView, LabelView

from headrace_coordinator.domain.devices.leases import REPLY
from headrace_coordinator.domain.intervals import Interval, joined, without

if TYPE_CHECKING:
    from headrace_coordinator.projections.timeline import Part, Span

AT_WORK = {
    "learn": Label.TRAIN,
    "help": Label.TRAIN,
    "sync": Label.SYNC,
    "switch": Label.SWITCH,
    "prefill": Label.PREFILL,
    "evaluate": Label.DECODE,
    "generate": Label.DECODE,
    "act": Label.DECODE,
    "own turn": Label.DECODE,
    REPLY: Label.DECODE,
    "wait for lease": Label.WAIT_LEASE,
}
"""Labels of stages' work; any other is `work`. Of works at the same time the first of these names the time."""
ORDER = {stage: place for place, stage in enumerate(AT_WORK)}
FOR_ALL = ("switch", "sync", "checkpoint")
"""Stages that are timed on no device and keep all of the run's from other work."""
DECODES = ("generate", "evaluate")
Moment = tuple[str, Label, str]
"""Stage, label and holder of a device at a time."""


def labelled(parts: Sequence[Part], holds: Iterable[HoldView]) -> list[LabelView]:
    """Spans of the parts' devices by time: at any time of a part each device is in exactly one of them.

    Devices with the same stage, label and holder at the same time share a span. Where an engine does not measure
    prefill apart, it is in decode. Work that needs no device, such as scoring, is in spans without one.
    """
    listed = list(holds)
    devices = sorted({device for hold in listed for device in hold.devices} | _worked(parts))
    held = {device: [hold for hold in listed if device in hold.devices] for device in devices}
    together: dict[tuple[float, float, Moment], list[str]] = defaultdict(list)
    for part in parts:
        within = _Part(part)
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


class _Part:
    """One part: a step, an evaluation or a leave."""

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
        if stages:
            stage = min(stages, key=lambda each: ORDER.get(each, len(ORDER)))
            if stage in DECODES and _covers(self._rests.get(device, ()), at):
                return stage, self._waits_for(at), name
            if holder is not None and holder.stage == REPLY and stage not in AT_WORK:
                return stage, Label.DECODE, name  # A workflow's stage has a name of its own.
            return stage, AT_WORK.get(stage, Label.WORK), name
        for span in self._for_all:
            if span.start <= at < span.end:
                return span.stage, AT_WORK.get(span.stage, Label.WORK), name
        return (holder.stage, Label.WAIT_DATA, name) if holder else (UNPLANNED, Label.WAIT_LEASE, "")

    def _waits_for(self, at: float) -> Label:
        """What a device waits for that has decoded all that it was given."""
        place = bisect_left(self._decoding, (at, at))
        if place and self._decoding[place - 1][1] > at:
            return Label.WAIT_TAIL
        return Label.WAIT_REWARD if _covers(self.nowhere, at) else Label.WAIT_DATA

    def _times_of_decoding(self) -> list[Interval]:
        """The union of the times in which some device decodes, by time."""
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
