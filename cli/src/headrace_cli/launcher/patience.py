"""How long a start may take: as long as it progresses, up to a limit. Knows no fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil

STANDSTILL_S = 60.0
"""A start is given up once nothing has come up for so long, and what is missing has hardly used a core."""
WORK_S = 1.0
"""CPU seconds that count as work: more than a process that only waits uses in `STANDSTILL_S`."""
LOOK_S = 1.0


class Patience:
    """One start, which may take `timeout_s` in all."""

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_seconds: Callable[[Iterable[int]], float] | None = None,
    ) -> None:
        self._clock, self._cpu_seconds = clock, cpu_seconds or cpu_seconds_of
        self._timeout_s = timeout_s
        self._began = self._moved = clock()
        self._looked = float("-inf")
        self._missing = ""
        self._used = 0.0

    def over(self, missing: str, pids: Iterable[int]) -> str:
        """Why the wait for `missing`, whose processes are `pids`, ends now; empty while it goes on."""
        now = self._clock()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look(now, missing, pids)
        if now - self._began >= self._timeout_s:
            return f"not ready after {self._timeout_s:g} s (--timeout): {missing}"
        if now - self._moved >= STANDSTILL_S:
            return f"not ready, and no progress for {STANDSTILL_S:g} s: {missing}"
        return ""

    def _look(self, now: float, missing: str, pids: Iterable[int]) -> None:
        used = self._cpu_seconds(pids)
        if missing != self._missing or used < self._used or used - self._used >= WORK_S:
            self._moved, self._missing, self._used = now, missing, used


def cpu_seconds_of(pids: Iterable[int]) -> float:
    """CPU seconds that living processes have used so far."""
    total = 0.0
    for pid in pids:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            continue
        total += float(times.user + times.system)
    return total
