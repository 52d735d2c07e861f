"""Follows a run until it ends: asks the coordinator, tells a reporter. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.client import Client, Leases, Run, Step, Trajectory

POLL_S = 0.4


@dataclass
class Snapshot:
    """A run as it is now; `steps` are all committed steps, `sample` an answer of the newest one that has any."""

    run: Run
    steps: Sequence[Step] = field(default_factory=list)
    leases: Leases | None = None
    sample: Trajectory | None = None


class Reporter(Protocol):
    """Shows a run while it goes on."""

    wants_sample: bool
    """Whether it shows an answer of the newest step."""

    def note(self, text: str) -> None:
        """One line about something outside the run."""

    def update(self, snapshot: Snapshot) -> None:
        """The run changed, or a moment passed."""

    def close(self) -> None:
        """The run ended or nobody looks any longer; leaves the last picture in place."""


def follow(client: Client, run_id: str, reporter: Reporter, timeout_s: float | None = None) -> Snapshot:
    """Follows a run until it has ended; returns the last picture. TimeoutError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s if timeout_s else float("inf")
    snapshot = look(client, run_id, None, sample=reporter.wants_sample)
    while True:
        reporter.update(snapshot)
        if snapshot.run.ended:
            return snapshot
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run_id} has not ended after {timeout_s:g} s; {snapshot.run.waiting_for}")
        time.sleep(POLL_S)
        snapshot = look(client, run_id, snapshot, sample=reporter.wants_sample)


def look(client: Client, run_id: str, before: Snapshot | None, *, sample: bool = False) -> Snapshot:
    """The run now; steps are asked for only when there are new ones."""
    run = client.get(run_id)
    leases = None if run.ended else client.leases()
    if before and _steps_known(run, before):
        shown = before.sample or (_sample(client, run) if sample else None)
        return Snapshot(run, before.steps, leases, shown)
    shown = _sample(client, run) if sample else None
    return Snapshot(run, client.metrics(run_id) if run.step else [], leases, shown)


def _sample(client: Client, run: Run) -> Trajectory | None:
    """An answer of the newest step; none while it is being written."""
    if run.last_step is None:
        return None
    return next(iter(client.trajectories(run.id, run.last_step.step, 1)), None)


def _steps_known(run: Run, before: Snapshot) -> bool:
    """Whether nothing was committed since; after a rewind the same step has another version."""
    return run.step == before.run.step and run.policy == before.run.policy
