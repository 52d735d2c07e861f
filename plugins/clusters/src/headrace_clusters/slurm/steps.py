"""The parts of a fleet on the nodes of a job, each a step that srun started, until it has ended. Knows no run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from headrace_cli.launcher.stop import GRACE_S
from headrace_cli.output import error_console

from headrace_clusters.slurm.programs import call

SRUN = ("srun", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mpi=none", "--kill-on-bad-exit=0")
"""A node's own step: its status is the node's, and the others go on. What it starts uses all cores of the job's there,
and is no program of MPI.
"""
RESEND_S = 5.0
"""A step that had not begun yet has missed the signal."""
MARGIN_S = 20.0


class Steps:
    """The steps of a job by node. They are ended through scancel: srun kills its step when it gets a signal itself."""

    def __init__(self, job: str, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.starts: dict[str, int] = {}

    def start(self, node: str, command: Sequence[str]) -> None:
        """Runs a command on a node. Its errors are the job's; what else it says is in a file of the node's."""
        self.starts[node] = self.starts.get(node, 0) + 1
        with (self._folder / f"{node}.out").open("ab") as said:
            self._running[node] = subprocess.Popen(
                [*SRUN, f"--nodelist={node}", *command], stdin=subprocess.DEVNULL, stdout=said
            )

    def ended(self) -> dict[str, int]:
        """Statuses of the steps that have ended since the last question, by node."""
        found = {node: step.returncode for node, step in self._running.items() if step.poll() is not None}
        for node in found:
            del self._running[node]
        return found

    def stop(self) -> None:
        """Ends all of them in order, which takes trainers as long as a checkpoint; at most so long as `down` takes."""
        deadline, next_signal = time.monotonic() + GRACE_S + MARGIN_S, 0.0
        while self._running and time.monotonic() < deadline:
            if time.monotonic() >= next_signal:
                call("scancel", "--signal=TERM", self._job)
                next_signal = time.monotonic() + RESEND_S
            time.sleep(0.1)
            self.ended()
        if self._running:
            nodes = ", ".join(self._running)
            error_console().print(
                f"{nodes}: not ended within {GRACE_S + MARGIN_S:g} s; Slurm kills what is left"
            )
