"""Runs that share their instances, as a user who watches one of them sees it."""

from __future__ import annotations

import subprocess

from harness.specs import BATCH


def test_watching_goes_on_while_a_run_yields_to_another(fleet, spec_of, gate):
    gate.hold_after(BATCH + 3)
    scheduling = {"quantum_s": 0.1}
    patient = fleet.submit(spec_of(name="patient", steps=2000, reward=gate.reward, scheduling=scheduling))
    gate.wait_until_held()
    watch = subprocess.Popen(
        fleet.command("run", "watch", patient.id),
        env=fleet.variables("run", {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    first = watch.stdout.readline()  # It watches before the other run comes.
    urgent = fleet.submit(spec_of(name="urgent", steps=2, scheduling={"priority": 9}))
    gate.open()
    assert fleet.succeed(urgent).step == 2
    again = fleet.state(patient, "RUNNING")
    assert again.recoveries == 0
    fleet.reach(patient, again.step + 40)  # long enough for the watcher to look
    fleet.client.cancel(patient.id)
    rest, errors = watch.communicate(timeout=120)
    shown = first + rest
    assert watch.returncode == 1 and "CANCELLED" in errors
    states = [line.split()[3].rstrip(":") for line in shown.splitlines() if line.startswith("run ")]
    left = states.index("QUEUED")
    assert "RUNNING" in states[:left] and "RUNNING" in states[left:] and states[-1] == "CANCELLED"
    assert f"yields to {urgent.id}" in shown and f"held by {urgent.id}" in shown
    assert "its last checkpoint stays" in errors
