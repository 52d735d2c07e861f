"""A rank of two that dies or stands still, at any moment: found in seconds, the group formed anew, charged once."""

from __future__ import annotations

import os
import signal
import time

import pytest
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 4
FORMED_S = 30.0
"""From the fault to the group that is formed anew."""
WORKERS = ("rollout-0", "trainer-0", "trainer-1", "reward-0")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
MIDDLE = [
    ("trainer-1", STOP),
    pytest.param("trainer-0", STOP, marks=pytest.mark.nightly),
    pytest.param("trainer-1", KILL, marks=pytest.mark.nightly),
    pytest.param("trainer-0", KILL, marks=pytest.mark.nightly),
]
MEETING = [
    ("trainer-0", KILL, 0.0),
    ("trainer-0", KILL, 0.05),
    ("trainer-0", KILL, 0.2),
    ("trainer-1", KILL, 0.0),
    ("trainer-0", STOP, 0.0),
    ("trainer-1", STOP, 0.05),
]


def formed_anew(fleet, run, since: int, began: float) -> float:
    """Seconds from `began` to the next group of the run after event `since`."""
    for event in fleet.client.events(run.id, since):
        if event.type == "trainer_group_formed":
            return time.monotonic() - began
    raise AssertionError(f"no group was formed again: {fleet.client.get(run.id)}")


def second_commit(fleet, run) -> int:
    """Number of the event that commits the run's second step."""
    commits = (event.id for event in fleet.client.events(run.id) if event.type == "step_committed")
    next(commits)
    return next(commits)


def check(fleet, run, steps: int) -> None:
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == steps * BATCH and not found.dropped
    recoveries = [event.data for event in fleet.events(run) if event.type == "run_recovering"]
    assert len(recoveries) == 1, recoveries


@pytest.mark.nightly  # quick: test_trainer_liveness ends ranks of Gloo groups
@pytest.mark.parametrize(("instance", "number"), MIDDLE)
def test_a_rank_that_ends_in_the_middle_of_a_step(own_fleet, spec_of, gate, instance, number):
    with own_fleet("--trainer", "2") as fleet:
        fleet.ready(*WORKERS)
        gate.hold_after(2 * BATCH + 3)
        run = fleet.submit(spec_of(steps=STEPS, reward=gate.reward, trainer__ranks=2))
        gate.wait_until_held()
        seen = second_commit(fleet, run)
        lost = fleet.kill(instance, number)
        began = time.monotonic()
        gate.open()
        assert formed_anew(fleet, run, seen, began) < FORMED_S
        fleet.replaced(instance, lost)
        check(fleet, run, STEPS)


@pytest.mark.nightly  # test_trainer_liveness ends ranks of Gloo groups as they meet
@pytest.mark.parametrize(("instance", "number", "moment_s"), MEETING)
def test_a_rank_that_ends_as_ranks_meet(own_fleet, spec_of, instance, number, moment_s):
    with own_fleet("--trainer", "2") as fleet:
        fleet.ready(*WORKERS)
        pid = fleet.pid_of(instance)
        run = fleet.submit(spec_of(steps=2, trainer__ranks=2))
        seen = next(event.id for event in fleet.client.events(run.id) if event.type == "trainer_group_formed")
        time.sleep(moment_s)  # the moment is what is tested
        os.kill(pid, number)
        assert formed_anew(fleet, run, seen, time.monotonic()) < FORMED_S
        check(fleet, run, 2)
