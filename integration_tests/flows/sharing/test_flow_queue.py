"""Runs that share their instances, as a user who watches one of them sees it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness.fleet import Fleet
from harness.gate import Gate
from harness.specs import BATCH
from harness.waiting import wait_for
from headrace.client import Run


class Watcher:
    """`headrace run watch` of a run; `lines` grows while it shows more."""

    def __init__(self, fleet: Fleet, run: Run) -> None:
        self.process = subprocess.Popen(
            fleet.command("run", "watch", run.id),
            env=fleet.variables("run", {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)

    def states(self) -> list[str]:
        """The run's states as they were shown."""
        return [line.split()[3].rstrip(":") for line in [*self.lines] if line.startswith("run ")]

    def shows(self, text: str) -> None:
        """Waits until a text was shown."""
        wait_for(lambda: any(text in line for line in [*self.lines]), f"the watcher to show {text!r}")

    def end(self) -> tuple[int, str]:
        """Exit status and what it said of errors, when it has ended by itself."""
        self._reader.join(120)
        return self.process.wait(120), self.process.stderr.read()


@contextmanager
def watching(fleet: Fleet, run: Run) -> Iterator[Watcher]:
    """A watcher, which does not outlive the block."""
    watcher = Watcher(fleet, run)
    try:
        yield watcher
    finally:
        watcher.process.kill()
        watcher.process.wait()


@pytest.mark.nightly  # quick: test_flow_many_runs has one that yields
def test_watching_goes_on_while_a_run_yields_to_another(fleet, spec_of, gate, tmp_path):
    """A watcher looks now and then: each state stays until it was shown."""
    gate.hold_after(BATCH + 3)
    scheduling = {"quantum_s": 0.1}
    patient = fleet.submit(spec_of(name="patient", steps=10_000, reward=gate.reward, scheduling=scheduling))
    gate.wait_until_held()
    others_gate = Gate(tmp_path / "urgent")
    others_gate.hold_after(3)
    with watching(fleet, patient) as watcher:
        watcher.shows("RUNNING")
        urgent = fleet.submit(
            spec_of(name="urgent", steps=2, reward=others_gate.reward, scheduling={"priority": 9})
        )
        gate.open()
        watcher.shows(f"yields to {urgent.id}")
        watcher.shows(f"held by {urgent.id}")
        others_gate.open()
        assert fleet.succeed(urgent).step == 2
        wait_for(
            lambda: "RUNNING" in (states := watcher.states())[states.index("QUEUED") :],
            "it to be shown to go on",
        )
        assert fleet.client.get(patient.id).recoveries == 0
        fleet.client.cancel(patient.id)
        status, errors = watcher.end()
    assert status == 1 and "CANCELLED" in errors
    assert watcher.states()[-1] == "CANCELLED"
    assert "its last checkpoint stays" in errors
