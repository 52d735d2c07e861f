"""The file of who held which device when, and at which stage: one line for each step, evaluation and leave.

Bounded: a full file replaces the one before it, so the oldest part of a long run is forgotten. Times are seconds since
the epoch. Knows no lease rule: holds and spans come ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
from headrace_schema.resources.overviews import HoldView, TimelinePartView, TimelineView, WorkView

from headrace_coordinator.projections.labels import labelled
from headrace_coordinator.projections.lines import LineFile, read_lines

NAME, OLD_NAME = "timeline.jsonl", "timeline-old.jsonl"
FILE_BYTES = 2 * 1024 * 1024
MOST_SPANS = 4000
"""Spans of one answer: a page that draws more shows no more."""
Kind = Literal["prepare", "step", "skipped", "evaluation", "leave"]


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """A lease that is over: `instance` held `devices` for a stage."""

    epoch: int
    instance: str
    stage: str
    devices: list[str]
    start: float
    end: float
    cause: str


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Work of a stage on devices; on none for what needs none."""

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
    """Times of a stage in which devices had nothing to do, such as a rollout's while others decode the tail."""


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
) -> TimelineView:
    """The newest `steps` steps that began before a time, and every hold that overlaps them; `live` holds go on.

    Evaluations and the like come with them: what came between them and after the last one.

    With `labels` each device's time in the parts has one label.
    """
    every = [part for name in (OLD_NAME, NAME) for part in _parts(directory / name)]
    known = [part for part in every if before is None or part.start < before]
    chosen = _fitting(_from_step(known, steps))
    holds = [_hold_view(hold) for part in every for hold in part.holds]
    holds += live
    start = chosen[0].start if chosen else min((hold.start for hold in holds), default=0.0)
    end = chosen[-1].end if before is not None and chosen else None
    shown = [hold for hold in holds if _overlaps(hold, start, end)]
    return TimelineView(
        parts=[TimelinePartView(kind=p.kind, step=p.step, start=p.start, end=p.end) for p in chosen],
        work=[
            WorkView(stage=span.stage, devices=span.devices, start=span.start, end=span.end, step=part.step)
            for part in chosen
            for span in part.work
        ],
        holds=sorted(shown, key=lambda hold: hold.start)[-MOST_SPANS:],
        labels=labelled(chosen, holds) if labels else [],
        older=len(known) > len(chosen),
    )


def _from_step(parts: list[Part], steps: int) -> list[Part]:
    """The parts from the so manyth step from the end on; all where there are fewer."""
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


def _hold_view(hold: Hold) -> HoldView:
    return HoldView(
        epoch=hold.epoch,
        instance=hold.instance,
        stage=hold.stage,
        devices=hold.devices,
        start=hold.start,
        end=hold.end,
        cause=hold.cause,
    )


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
