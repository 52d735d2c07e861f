"""Where a run's steps, restores, evaluations and checkpoints stand in its history: files of fixed records.

Derived from the segments, so a damaged index is made again. Knows no event and no rule but which records are live.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace_coordinator.domain.totals import Counts
from headrace_coordinator.store.segments import overwrite

_RECORD = struct.Struct("<QQQII9q")
SKIPPED, COMMITTED = 0, 1
Range = tuple[int, int]


class Record(NamedTuple):
    """Where an entry's line stands, and what it is looked up by.

    `counts` is a step's tally after it; of a fork's restore, its first is the slot ordinal that the fork begins with.
    """

    sequence: int
    segment: int
    offset: int
    length: int
    kind: int = 0
    number: int = 0
    ordinal: int = 0
    step: int = 0
    counts: Counts = (0, 0, 0, 0, 0, 0)


class Index:
    """The records of one kind. Sequences rise; so do steps between two rewinds, and numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        try:
            return self.path.stat().st_size // _RECORD.size
        except FileNotFoundError:
            return 0

    def read(self, first: int, end: int) -> list[Record]:
        """Records from `first` up to `end`, as far as there are any; an index without a file has none."""
        if min(end, len(self)) <= first:
            return []
        with self.path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), (end - first) * _RECORD.size, first * _RECORD.size)
        whole = len(data) // _RECORD.size * _RECORD.size
        return [_record(values) for values in _RECORD.iter_unpack(data[:whole])]

    def append(self, records: list[Record]) -> None:
        """Adds records; a part of one that a crash left is overwritten."""
        data = b"".join(_RECORD.pack(*record[:-1], *record.counts) for record in records)
        overwrite(self.path, len(self) * _RECORD.size, data)

    def cut(self, count: int) -> None:
        """Keeps the first `count` records."""
        overwrite(self.path, count * _RECORD.size, b"")

    def first(self, holds: Callable[[Record], bool], low: int = 0, end: int | None = None) -> int:
        """Position of the first record that `holds`, given that all after it do; `end` when there is none."""
        high = len(self) if end is None else end
        while low < high:
            middle = (low + high) // 2
            if holds(self.read(middle, middle + 1)[0]):
                high = middle
            else:
                low = middle + 1
        return low

    def last(self) -> Record | None:
        """The newest record."""
        count = len(self)
        return self.read(count - 1, count)[0] if count else None

    def live(self, rewinds: list[tuple[int, int]]) -> list[Range]:
        """Positions that no rewind took away. Each is (its sequence, the first step that it took away)."""
        ranges: list[Range] = []
        begin = 0
        for sequence, step in rewinds:
            end = self.first(lambda record: record.sequence > sequence, begin)  # noqa: B023
            _add(ranges, begin, end)
            while ranges:
                low, high = ranges.pop()
                cut = self.first(lambda record: record.step >= step, low, high)  # noqa: B023
                if cut > low:
                    ranges.append((low, cut))
                    break
            begin = end
        _add(ranges, begin, len(self))
        return ranges


def _add(ranges: list[Range], begin: int, end: int) -> None:
    if end > begin:
        ranges.append((begin, end))


def _record(values: tuple[int, ...]) -> Record:
    sequence, segment, offset, length, kind, number, ordinal, step, *counts = values
    trained, dropped, duplicates, missing, staleness, filtered = counts
    found = (trained, dropped, duplicates, missing, staleness, filtered)
    return Record(sequence, segment, offset, length, kind, number, ordinal, step, found)
