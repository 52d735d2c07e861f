"""How far a long piece of work is: counted where it is done, read by whoever tells people. Knows no work.

Without `counting` the work of a process is on one counter, which its heartbeats tell.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

QUIET_S = 10.0
"""What has not moved for so long is told no more: it is over, or says nothing."""


class Progress(NamedTuple):
    """`done` of `total` (0: unknown) units: bytes, rows, steps, tensors."""

    done: int
    total: int
    unit: str
    note: str = ""

    def words(self, seconds: float) -> str:
        """ "62%, 1.2 of 1.9 GB, about 12 s left", after so many seconds of work."""
        scale, unit = (1e9, "GB") if self.unit == "bytes" else (1, self.unit)
        shown = [f"{each / scale:,.1f}" if scale > 1 else f"{each:,}" for each in (self.done, self.total)]
        note = f", {self.note}" if self.note else ""
        if not self.total:
            return f"{shown[0]} {unit}{note}"
        left = seconds * (self.total - self.done) / self.done if self.done else 0.0
        about = f", about {left:.0f} s left" if self.done < self.total and left >= 1 else ""
        return f"{100 * self.done // self.total}%, {shown[0]} of {shown[1]} {unit}{about}{note}"


class Counter:
    """One piece of work after the other. Threads may add while others read."""

    def __init__(self) -> None:
        self._now: Progress | None = None
        self._moved = 0.0

    def begin(self, total: int, unit: str) -> None:
        """Counts from 0 on; `total` 0: nobody knows."""
        self._now, self._moved = Progress(0, total, unit), time.monotonic()

    def add(self, done: int = 1, note: str = "") -> None:
        """So much more is done; nothing where nothing was begun."""
        if self._now is not None:
            self._now = self._now._replace(done=self._now.done + done, note=note)
            self._moved = time.monotonic()

    def end(self) -> None:
        """Nothing is in work."""
        self._now = None

    def read(self) -> Progress | None:
        """How far it is; None where nothing is in work."""
        return self._now if time.monotonic() - self._moved < QUIET_S else None


_COUNTER: ContextVar[Counter] = ContextVar("headrace_progress", default=Counter())  # noqa: B039 - one for the process


def counter() -> Counter:
    """The counter of what calls."""
    return _COUNTER.get()


@contextmanager
def counting() -> Iterator[Counter]:
    """A counter of its own for the body, and for the threads that it starts with its context."""
    own = Counter()
    token = _COUNTER.set(own)
    try:
        yield own
    finally:
        _COUNTER.reset(token)
