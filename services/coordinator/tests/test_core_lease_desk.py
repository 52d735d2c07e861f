"""Leases over time, on a clock that the test moves."""

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.fleet import Fleet, FleetSettings, Supervisor
from headrace_coordinator.kernel import Kernel
from headrace_coordinator.store.memory_store import MemoryStore

SETTINGS = FleetSettings()


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
async def fleet(clock):
    kernel = Kernel(MemoryStore(), lambda: clock[0])
    await kernel.open("test", None)
    return Fleet(kernel, lambda kind, address, incarnation: None, SETTINGS)


async def test_a_holder_in_doubt_is_killed_once_its_supervisor_is_back(fleet, clock):
    """The command that was sent while host h was cut off never arrived."""
    fleet.kernel.post(
        ev.LeaseGranted(at=0, epoch=1, incarnation="a", run="r", stage="learn", devices=["h/cpu:0"])
    )
    clock[0] = SETTINGS.lease_ttl + 1
    fleet.sweep_once()
    clock[0] += SETTINGS.lease_ttl + 1
    fleet.sweep_once()
    assert fleet.kernel.state.table.quarantined["h/cpu:0"].incarnation == "a"
    sent = []
    fleet.supervised(Supervisor("h", lambda *command: sent.append(command), incarnations=frozenset("a")))
    fleet.sweep_once()
    assert [(command, body[1]) for command, body in sent] == [("kill", "a")]
    fleet.exited("a", "killed")
    assert not fleet.kernel.state.table.quarantined
    fleet.sweep_once()
    assert len(sent) == 1, "whoever is proven gone is killed no more"
