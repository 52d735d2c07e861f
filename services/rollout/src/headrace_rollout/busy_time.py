"""Seconds in which at least one of several things was at work."""

from __future__ import annotations

import time


class BusyTime:
    """The union of intervals that begin and end as they are told."""

    def __init__(self) -> None:
        self._open = 0
        self._since = self._total = 0.0

    def begin(self) -> None:
        """One more is at work."""
        if not self._open:
            self._since = time.perf_counter()
        self._open += 1

    def end(self) -> None:
        """One less is at work."""
        self._open -= 1
        if not self._open:
            self._total += time.perf_counter() - self._since

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._total + (time.perf_counter() - self._since if self._open else 0.0)
