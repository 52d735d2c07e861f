"""Stops a fleet and leaves nothing of it behind but its data."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.state import FleetLock, is_locked, read_state
from headrace_cli.launcher.tether import kill_marked

GRACE_S = 25.0
KILL_S = 5.0


def stop_fleet(data_dir: DataDir, launcher_pid: int = 0) -> bool:
    """Asks the launcher to stop, kills it when it does not within 25 s; returns whether one lived.

    `launcher_pid` names a launcher that may not have written its state yet.
    """
    state = read_state(data_dir)
    lived = is_locked(data_dir)
    pid = launcher_pid or (state.launcher_pid if state and lived else 0)
    if pid:
        _end(pid, data_dir)
    clean_up(data_dir)
    return lived


def _end(pid: int, data_dir: DataDir) -> None:
    for signal_number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, KILL_S)):
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            return
        give_up_at = time.monotonic() + patience_s
        while time.monotonic() < give_up_at:
            if _is_gone(pid) and not is_locked(data_dir):
                return
            time.sleep(0.05)


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
