"""What runs on each node but the first: its part of the fleet, which stays until the head's trainers have saved.

Slurm signals all nodes of a job at once. A run that loses its rollouts at that moment is busy with their loss, and
saves nothing in the seconds that are left.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.state import read_state
from headrace_cli.launcher.stop import TRAINERS_GRACE_S
from headrace_cli.launcher.tether import tether

SAVING = ("starting", "running", "stopping the trainers")
"""Phases of the head in which its trainers live."""
LOOK_S = 0.1


def run_part(head: Path, command: Sequence[str]) -> int:
    """Runs a command until it ends, or until SIGTERM and the head's trainers have ended; returns its status.

    `head` is the head's data directory.
    """
    told = False

    def tell(number: int, frame: object) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, tell)
    part = subprocess.Popen(command, start_new_session=True, preexec_fn=tether(signal.SIGTERM))
    while part.poll() is None and not told:
        time.sleep(LOOK_S)
    deadline = time.monotonic() + TRAINERS_GRACE_S
    while part.poll() is None and _saves(DataDir.at(head)) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    if part.poll() is None:
        part.terminate()
    return part.wait()


def _saves(head: DataDir) -> bool:
    state = read_state(head)
    return state is not None and state.phase.startswith(SAVING)
