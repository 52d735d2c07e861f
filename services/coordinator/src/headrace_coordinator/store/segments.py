"""Append-only files of numbered lines, each named by its first line's number. Knows nothing of what a line says.

A line is its number, a space, and JSON. Numbers rise, with gaps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from headrace_servicekit.folders import open_below, replace_below

SEGMENT_BYTES = 64 << 20
_BLOCK = 1 << 16
Line = tuple[int, bytes]


class LinePlace(NamedTuple):
    """Where a line stands: the number that names its segment, offset and length in bytes."""

    segment: int
    offset: int
    length: int


class Segments:
    """The segments in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def names(self) -> list[int]:
        """Numbers of the segments, oldest first."""
        return sorted(int(path.stem) for path in self.directory.glob("[0-9]*.jsonl"))

    def path(self, segment: int) -> Path:
        """A segment's file."""
        return self.directory / f"{segment:020d}.jsonl"

    def append(self, end: LinePlace | None, lines: list[Line]) -> list[LinePlace]:
        """Writes lines behind `end`, over what a failed write left there; returns the place of each line."""
        if end is None or end.offset + end.length >= SEGMENT_BYTES:
            end = LinePlace(lines[0][0], 0, 0)
        places, offset, parts = [], end.offset + end.length, []
        for number, text in lines:
            part = b"%d %s\n" % (number, text)
            places.append(LinePlace(end.segment, offset, len(part)))
            parts.append(part)
            offset += len(part)
        overwrite(self.path(end.segment), end.offset + end.length, b"".join(parts))
        return places

    def after(self, number: int) -> Iterator[tuple[Line, LinePlace]]:
        """Whole lines with higher numbers, in order; ends at a damaged one."""
        names = self.names()
        started = max((index for index, name in enumerate(names) if name <= number), default=0)
        for name in names[started:]:
            for line, place in self._lines(name, self._offset_after(name, number)):
                if line[0] > number:
                    yield line, place

    def before(self, number: int, most: int) -> list[Line]:
        """At most `most` whole lines with lower numbers, the highest one first."""
        found: list[Line] = []
        for name in reversed(self.names()):
            if name < number and len(found) < most:
                found += self._back(name, self._offset_after(name, number - 1), most - len(found))
        return found

    def _back(self, segment: int, end: int, most: int) -> list[Line]:
        """The last lines of a segment before an offset, the last one first."""
        size = _BLOCK
        while True:
            begin = max(0, end - size)
            with self.path(segment).open("rb") as file:
                begin = _line_start(file.fileno(), begin, end) if begin else 0
            lines = [line for line, place in self._lines(segment, begin) if place.offset < end]
            if len(lines) >= most or begin == 0:
                return lines[: -most - 1 : -1]
            size *= 4

    def cut(self, number: int) -> tuple[LinePlace | None, bytes]:
        """Removes the lines with higher numbers; returns the end of what is left, and the removed bytes."""
        end: LinePlace | None = None
        removed = b""
        for name in reversed(self.names()):
            if name > number:
                removed = self.path(name).read_bytes() + removed
                self.path(name).unlink()
                continue
            offset = self._offset_after(name, number)
            with self.path(name).open("rb") as file:
                file.seek(offset)
                removed = file.read() + removed
            overwrite(self.path(name), offset, b"")
            end = LinePlace(name, offset, 0)
            break
        return end, removed

    def read(self, place: LinePlace) -> bytes:
        """The JSON of a line; empty when the file does not have it."""
        return next(self.read_all([place]))

    def read_all(self, places: Iterable[LinePlace]) -> Iterator[bytes]:
        """The JSON of each place's line, lazily; consecutive places of one segment share an open file."""
        for segment, found in groupby(places, key=lambda place: place.segment):
            group = list(found)
            try:
                with self.path(segment).open("rb", buffering=0) as file:
                    for _, offset, length in group:
                        yield os.pread(file.fileno(), length, offset).partition(b" ")[2].rstrip(b"\n")
            except FileNotFoundError:
                yield from [b""] * len(group)

    def _lines(self, segment: int, offset: int) -> Iterator[tuple[Line, LinePlace]]:
        with self.path(segment).open("rb") as file:
            file.seek(offset)
            for text in file:
                number, _, rest = text.partition(b" ")
                if not text.endswith(b"\n") or not number.isdigit():
                    return
                yield (int(number), rest[:-1]), LinePlace(segment, offset, len(text))
                offset += len(text)

    def _offset_after(self, segment: int, number: int) -> int:
        """Where the first line with a higher number, or a damaged one, begins: bisection over bytes."""
        if segment > number:
            return 0
        with self.path(segment).open("rb") as file:
            low, high = 0, os.fstat(file.fileno()).st_size
            while high - low > _BLOCK:
                middle = _line_start(file.fileno(), (low + high) // 2, high)
                if middle >= high or _number_at(file.fileno(), middle) > number:
                    high = (low + high) // 2
                else:
                    low = middle
        for line, place in self._lines(segment, low):
            if line[0] > number:
                return place.offset
            low = place.offset + place.length
        return low


def _line_start(descriptor: int, offset: int, end: int) -> int:
    """Offset behind the first line end at or after `offset`; `end` when there is none before it."""
    while offset < end:
        block = os.pread(descriptor, _BLOCK, offset)
        found = block.find(b"\n")
        if found >= 0:
            return offset + found + 1
        offset += len(block) or end
    return end


def _number_at(descriptor: int, offset: int) -> int:
    """Number of the line that begins here; beyond every number for a damaged one."""
    head, space, _ = os.pread(descriptor, 24, offset).partition(b" ")
    return int(head) if space and head.isdigit() else 1 << 63


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Writes `data` at `offset` of RUN/history/NAME and cuts it off behind that. OSError when the disk refuses."""
    descriptor = open_below(path.parents[2], path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if os.fstat(descriptor).st_size != offset:
            os.ftruncate(descriptor, offset)
        while data:
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(descriptor)


def write_synced(root: Path, path: Path, data: bytes) -> None:
    """Replaces a file of a run by a rename; returns when the new content survives a loss of power."""
    with replace_below(root, path, synced=True) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Returns when a file or a directory survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
