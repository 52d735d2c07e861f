"""Containers are killed, scaled and cut off in the middle of a run: it goes on, and its ledger is whole.

Commands to containers take as long as they take. So the runs here are longer than any of them, and are ended when
they have shown that they go on.
"""

from __future__ import annotations

import time

import pytest
from compose.fleet import ENDLESS, RUN_S
from harness.ledger import audit
from harness.specs import BATCH
from harness.waiting import wait_for

CUT_OFF_S = 10.0
LONGER_THAN_A_LEASE_S = 45.0


@pytest.fixture
def running(fleet, spec_of):
    """A run in its middle."""
    fleet.ready()
    spec = spec_of(steps=ENDLESS, scheduling__quantum_s=3600)  # it yields to no other run
    return fleet.reach(fleet.submit(spec), 2)


def goes_on(fleet, run):
    """The run goes on, and all instances are there again; returns its audit."""
    found = fleet.goes_on(run)
    fleet.ready()
    return found


@pytest.mark.parametrize(
    "service",
    [
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("rollout", "reward")),
        *("trainer", "coordinator"),
    ],
)
def test_a_killed_process_is_started_again_by_its_supervisor(fleet, running, service):
    before = fleet.inspect(service)["RestartCount"]
    fleet.kill_process(service)
    found = goes_on(fleet, running)
    assert found.rewinds == (service == "trainer"), "only the trainer holds what a version is made of"
    assert fleet.inspect(service)["RestartCount"] == before, "the container itself went on"


@pytest.mark.parametrize(
    "service",
    [
        pytest.param("rollout", marks=pytest.mark.nightly),
        "trainer",
        pytest.param("coordinator", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_supervisors_container_is_started_again_by_its_policy(fleet, running, service):
    fleet.kill_supervisor(service)
    goes_on(fleet, running)


@pytest.mark.nightly  # quick: test_fault_kills kills the store of a fleet of processes
def test_a_killed_store_loses_nothing_acknowledged(fleet, running, spec_of):
    queued = fleet.submit(spec_of(steps=1), idempotency_key="acknowledged")
    step = fleet.client.get(running.id).step
    fleet.kill_redis()
    again = fleet.submit(spec_of(steps=1), idempotency_key="acknowledged")
    assert again.id == queued.id and fleet.client.get(running.id).step >= step
    assert goes_on(fleet, running).rewinds == 0
    fleet.succeed(queued)


@pytest.mark.nightly  # quick: test_fault_no_store.py
def test_a_store_that_is_restarted_while_nobody_writes(fleet, spec_of):
    run = fleet.succeed(fleet.submit(spec_of(steps=1)))
    fleet.compose("restart", "redis", "coordinator")
    fleet.up()
    assert len(audit(fleet, fleet.client.get(run.id)).trained) == BATCH


@pytest.mark.nightly  # test_flow_steering scales a fleet of processes
def test_services_are_scaled_in_the_middle_of_a_run(fleet, spec_of):
    fleet.up("--scale", "rollout=2", "--scale", "reward=2")
    try:
        run = fleet.submit(spec_of(steps=ENDLESS, rollout__instances=2, checkpoint__interval_steps=50))
        fleet.reach(run, 3)
        fleet.up("--scale", "rollout=1", "--scale", "reward=1")
        fleet.reach(run, fleet.client.get(run.id).step + 2)
        fleet.up("--scale", "rollout=2", "--scale", "reward=2")
        wait_for(lambda: _at_work(fleet) == 2, "the new rollout to take part", 60)
        assert not fleet.goes_on(run).abandoned
    finally:
        fleet.up("--scale", "rollout=1", "--scale", "reward=1")


def _at_work(fleet):
    """How many rollouts hold a lease to generate."""
    return len({lease.instance for lease in fleet.client.leases().leases if lease.stage == "generate"})


@pytest.mark.nightly  # quick: the seeded simulation removes containers
@pytest.mark.timeout(600, func_only=True)
def test_the_core_of_a_removed_container_is_free_again(fleet, spec_of):
    fleet.ready()
    apart = spec_of(
        steps=ENDLESS, scheduling__quantum_s=3600, placement={"mode": "disaggregated"}
    )  # the rollout holds its core at all times
    run = fleet.reach(fleet.submit(apart), 2)
    fleet.remove("rollout")
    wait_for(lambda: doubted(fleet), "the core to be in quarantine", 60)
    fleet.up()
    goes_on(fleet, run)
    assert not doubted(fleet)


def doubted(fleet):
    """Devices in quarantine."""
    return [device.name for device in fleet.client.leases().devices if device.state == "QUARANTINED"]


@pytest.mark.nightly  # quick: the seeded simulation cuts instances off
@pytest.mark.parametrize("seconds", [CUT_OFF_S, LONGER_THAN_A_LEASE_S])
def test_a_trainer_that_is_cut_off(fleet, running, seconds):
    fleet.disconnect("trainer")
    try:
        time.sleep(seconds)  # how long the network is away is the test itself
        wait_for(lambda: fleet.client.get(running.id).waiting_for, "the run to say what it waits for", RUN_S)
    finally:
        fleet.connect("trainer")
    goes_on(fleet, running)
