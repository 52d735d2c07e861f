"""Time that goes on while the machine sleeps, for lease deadlines."""

from __future__ import annotations

import time


def boottime() -> float:
    """Seconds on CLOCK_BOOTTIME; unlike the monotonic clock it counts a suspended machine's time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
