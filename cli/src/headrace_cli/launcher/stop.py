"""Stops a fleet and leaves nothing of it behind but its data."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.state import FleetLock, is_locked, read_state
from headrace_cli.launcher.tether import kill_marked

TRAINERS_GRACE_S = 30.0
INSTANCES_GRACE_S = 5.0
COORDINATOR_GRACE_S = 5.0
STORE_GRACE_S = 5.0
"""From SIGTERM to SIGKILL, in the order in which the launcher stops its processes. Only trainers have to save."""
GRACE_S = TRAINERS_GRACE_S + INSTANCES_GRACE_S + COORDINATOR_GRACE_S + STORE_GRACE_S + 10.0
KILL_S = 5.0


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignores Ctrl-C: what is done inside has deadlines, and half of it would leave orphans."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stop_fleet(
    data_dir: DataDir, launcher_pid: int = 0, progress: Callable[[str], None] = lambda text: None
) -> bool:
    """Asks the launcher to stop, kills it when it does not within 55 s; returns whether one lived.

    `launcher_pid` names a launcher that may not have written its state yet. `progress` hears what is being
    stopped, with its deadline.
    """
    state = read_state(data_dir)
    lived = is_locked(data_dir)
    pid = launcher_pid or (state.launcher_pid if state and lived else 0)
    if pid and not _ends(pid, data_dir, signal.SIGTERM, GRACE_S, progress):
        progress(f"the launcher did not stop within {GRACE_S:g} s; killing it and its processes")
        _ends(pid, data_dir, signal.SIGKILL, KILL_S, progress)
    clean_up(data_dir)
    return lived


def _ends(
    pid: int, data_dir: DataDir, number: signal.Signals, patience_s: float, progress: Callable[[str], None]
) -> bool:
    """Signals the launcher; returns whether it ends in time."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    told = ""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if _is_gone(pid) and not is_locked(data_dir):
            return True
        state = read_state(data_dir)
        if state and state.phase != told and state.phase.startswith("stopping"):
            told = state.phase
            progress(told)
        time.sleep(0.05)
    return False


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; a child of ours that nobody waited for counts as ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] == "Z"


def clean_up(data_dir: DataDir) -> None:
    """Kills and removes what a dead launcher left; does nothing while another one lives."""
    if not data_dir.root.is_dir():
        return
    lock = FleetLock(data_dir.lock_file)
    if not lock.acquire():
        return
    try:
        sweep(data_dir)
    finally:
        lock.release()


def sweep(data_dir: DataDir) -> None:
    """Processes, shared memory and state of a former fleet; only for the holder of the lock."""
    killed = kill_marked(data_dir.fleet_id)
    if killed:
        print(f"killed processes that a former fleet left: {killed}", flush=True)
    state = read_state(data_dir)
    if state and Path(state.shared_memory).name in (data_dir.fleet_id, "shm"):
        shutil.rmtree(state.shared_memory, ignore_errors=True)
    shutil.rmtree(data_dir.short_folder, ignore_errors=True)
    data_dir.state_file.unlink(missing_ok=True)
