"""kill -9 of any process while a run is in the middle of a step: it goes on, with nothing trained twice or lost."""

from __future__ import annotations

import time

import pytest
from harness.fleet import Fleet, moment
from harness.ledger import audit
from harness.specs import BATCH

STEPS = 4
WORKERS = ("rollout-0", "trainer-0", "reward-0")
SLOW_DECODING = "rollout.round=delay:0.05"


@pytest.fixture
def held(fleet, spec_of, gate, request):
    """A run that stands still in its third step, with answers that wait for their scores."""
    fleet.ready(*WORKERS)
    gate.hold_after(2 * BATCH + 3)
    mode = getattr(request, "param", "collocated")
    run = fleet.submit(spec_of(steps=STEPS, reward=gate.reward, placement__mode=mode))
    gate.wait_until_held()
    return fleet.reach(run, 2)


WORKERS_BY_MODE = [
    ("rollout-0", "collocated"),
    ("trainer-0", "disaggregated"),
    pytest.param("rollout-0", "disaggregated", marks=pytest.mark.nightly),
    pytest.param("trainer-0", "collocated", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("instance", "held"), WORKERS_BY_MODE, indirect=["held"])
def test_a_killed_worker_is_replaced(fleet, held, gate, instance):
    killed = fleet.kill(instance)
    gate.open()
    run = fleet.succeed(held)
    fleet.replaced(instance, killed)
    found = audit(fleet, run)
    assert len(found.trained) == STEPS * BATCH
    # Only the trainer holds what a version is made of: nobody else's end costs one.
    assert found.rewinds == (1 if instance == "trainer-0" else 0)


@pytest.mark.parametrize("instance", ["reward-0", "coordinator", "store"])
def test_a_killed_helper_of_the_run_costs_no_version(fleet, held, gate, instance):
    killed = fleet.kill(instance)
    fleet.replaced(instance, killed)
    gate.open()
    found = audit(fleet, fleet.succeed(held))
    assert len(found.trained) == STEPS * BATCH and not found.abandoned


def test_a_dead_trainers_versions_are_abandoned_and_made_again(fleet, gate, spec_of):
    """Checkpoints after every second step: the third version is lost with the trainer's memory."""
    fleet.ready(*WORKERS)
    gate.hold_after(3 * BATCH + 3)
    run = fleet.submit(spec_of(steps=5, reward=gate.reward, checkpoint__interval_steps=2))
    gate.wait_until_held()
    fleet.reach(run, 3)
    fleet.kill("trainer-0")
    gate.open()
    found = audit(fleet, fleet.succeed(run))
    assert len(found.trained) == 5 * BATCH
    assert [item.version.ordinal for item in found.abandoned] == [3]
    again = next(item for item in found.live if item.version.ordinal == 3)
    slots = [{(prompt, sample) for prompt, sample, _ in item.trained} for item in (again, *found.abandoned)]
    assert slots[0] == slots[1], "the slots go back to the front, in order"


@pytest.mark.nightly  # quick: test_many_runs has it in virtual time
def test_a_submission_waits_for_an_instance_that_is_being_restarted(fleet, spec_of):
    fleet.kill("trainer-0")
    fleet.succeed(fleet.submit(spec_of(steps=1)))


def test_an_acknowledged_submission_survives_any_kill(fleet, spec_of):
    fleet.ready(*WORKERS)
    run = fleet.submit(spec_of(steps=1), idempotency_key="survives")
    for instance in ("store", "coordinator"):
        fleet.replaced(instance, fleet.kill(instance))
    assert fleet.submit(spec_of(steps=1), idempotency_key="survives").id == run.id
    assert len(audit(fleet, fleet.succeed(run)).trained) == BATCH


@pytest.fixture(scope="module")
def slow_fleet(tmp_path_factory):
    """A fleet whose engine takes its time, so that a random moment is a moment of a step."""
    folder = tmp_path_factory.mktemp("slow") / "data"
    with Fleet(folder, "--simulator", "0", HEADRACE_FAILPOINTS=SLOW_DECODING) as shared:
        yield shared


def kill_at_a_random_moment(fleet, spec_of, instance, seed):
    fleet.ready(
        *WORKERS
    )  # The one that was killed last may not be back yet, and a run is admitted with it only.
    run = fleet.submit(spec_of(steps=10, placement__mode=("collocated", "disaggregated")[seed % 2]))
    fleet.reach(run, 1)
    time.sleep(moment(seed, 0.0, 1.5))  # the moment is what is random here; nothing is waited for
    fleet.kill(instance)
    assert len(audit(fleet, fleet.succeed(run)).trained) == 10 * BATCH


EVERYBODY = ["rollout-0", "reward-0", "trainer-0", "coordinator", "store"]


@pytest.mark.nightly  # quick: the seeded simulation kills at moments of virtual time
@pytest.mark.parametrize(("seed", "instance"), [(0, "rollout-0"), (1, "trainer-0")])
def test_a_kill_at_a_random_moment(fleet, spec_of, instance, seed):
    """In each placement once; the seeded simulation kills everybody at moments of virtual time."""
    kill_at_a_random_moment(fleet, spec_of, instance, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 110))
@pytest.mark.parametrize("instance", EVERYBODY)
def test_kills_at_many_random_moments(slow_fleet, spec_of, instance, seed):
    kill_at_a_random_moment(slow_fleet, spec_of, instance, seed)
