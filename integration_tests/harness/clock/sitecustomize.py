"""On PYTHONPATH: shifts what `time` says of the wall clock, by the rows KIND=SECONDS of HEADRACE_TEST_CLOCK.

KIND is what a process is: coordinator, rollout, …. Monotonic clocks stay as they are: one machine's never jump.
"""

import os
import sys
import time

_rows = dict(row.split("=") for row in os.environ.get("HEADRACE_TEST_CLOCK", "").split(",") if row)


def _kind() -> str:
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode(errors="replace").split("\0")
    return next((word.removeprefix("headrace_") for word in words if word.startswith("headrace_")), "")


if _shift := float(_rows.get(_kind(), 0)):
    _time, _time_ns = time.time, time.time_ns

    def _now() -> float:
        # grpc.aio hands its core deadlines of the wall clock: of the core's own, which no Python shifts.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return _time() + (0.0 if caller.startswith("grpc") else _shift)

    time.time = _now
    time.time_ns = lambda: _time_ns() + int(_shift * 1e9)
