"""Makes a child process end with its parent; a fleet's processes that outlive it are found by an environment mark."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

FLEET_MARK = "HEADRACE_FLEET"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def tether(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn`: the child gets the signal when the thread that started it ends (prctl(2))."""
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal_number))
        if os.getppid() != parent:  # the parent died between fork and prctl
            os._exit(1)

    return in_child


def child_environment(fleet_id: str) -> dict[str, str]:
    """Environment of a fleet's processes: marked, and with one compute thread until a lease gives more."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    quiet = {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **one_thread, **quiet, FLEET_MARK: fleet_id}


def marked_processes(fleet_id: str) -> list[int]:
    """Ids of all processes of ours that carry the fleet's mark, grandchildren included."""
    mark = f"{FLEET_MARK}={fleet_id}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it ended, or is another user's
            continue
    return found


def kill_marked(fleet_id: str) -> list[int]:
    """Kills what is left of a fleet; only for the holder of its lock."""
    found = marked_processes(fleet_id)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return found
