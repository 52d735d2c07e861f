"""Processes of an engine, by id. Linux."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

KILL_S = 20.0
_POLL_S = 0.05


def descendants(pids: Iterable[int]) -> list[int]:
    """The processes and all that they started, parents first."""
    found = list(pids)
    for pid in found:  # grows while it is walked
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def kill(pids: Sequence[int]) -> None:
    """SIGKILL to those that still run; returns when they have ended. Raises TimeoutError naming what stays."""
    give_up_at = time.monotonic() + KILL_S
    left = list(pids)
    while left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = [pid for pid in left if _runs(pid)]
        if left and time.monotonic() > give_up_at:
            raise TimeoutError(f"processes {left} of the engine did not end")
        if left:
            time.sleep(_POLL_S)


def _runs(pid: int) -> bool:
    """Whether it holds memory: a zombie waits for its parent alone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
