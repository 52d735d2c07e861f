"""An instance that its operator drains: durable, told once a session, and not before its run has let it go."""

import asyncio

import pytest
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.app import Coordinator
from headrace_coordinator.domain.state import InstanceState, restore, snapshot
from headrace_coordinator.fleet.fleet import DRAIN_S, Fleet
from headrace_coordinator.fleet.sessions import FleetSettings
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore


class Drained:
    """A coordinator with instances that only hear; `heard` has what each was told."""

    def __init__(self, tmp_path):
        self.event_log = EventLog(MemoryStore(), lambda: 0.0)
        self.fleet = Fleet(self.event_log, lambda kind, address, incarnation: None, FleetSettings())
        self.coordinator = Coordinator(self.event_log, self.fleet, tmp_path)
        self.heard = {}

    async def arrive(self, kind, incarnation):
        await self.fleet.register(
            InstanceState(f"{kind}-0", incarnation, kind, "h", "h:1", [], {}),
            [],
            0,
            self.event_log.state.store_id,
        )
        self.attach(incarnation)

    def attach(self, incarnation):
        self.heard[incarnation] = []
        self.fleet.attach(incarnation, lambda *command: self.heard[incarnation].append(command))

    def states(self):
        return {view.incarnation: view.state for view in self.coordinator.reads.instances()}


@pytest.fixture
async def drained(tmp_path):
    made = Drained(tmp_path)
    await made.event_log.open("test", None)
    writing = asyncio.create_task(made.event_log.run())
    yield made
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def test_an_instance_is_told_once_and_is_shown_as_draining(drained):
    await drained.arrive("rollout", "r1")
    assert drained.states() == {"r1": "READY"}
    for key in ("one", "one", "two"):
        assert await drained.coordinator.instance_changes.drain("rollout-0", key) == "r1"
    drained.fleet.sweep_once()
    assert drained.heard["r1"] == [("drain", DRAIN_S)]
    assert drained.states() == {"r1": "DRAINING"}
    restored = restore(snapshot(drained.event_log.state))
    assert restored.instances["r1"].draining


async def test_a_repeated_request_does_not_drain_the_next_process_of_the_name(drained):
    await drained.arrive("rollout", "r1")
    await drained.coordinator.instance_changes.drain("rollout-0", "key")
    drained.fleet.exited("r1", "it ended in order")
    await drained.arrive("rollout", "r2")
    assert await drained.coordinator.instance_changes.drain("rollout-0", "key") == "r1"
    assert drained.states() == {"r2": "READY"} and drained.heard["r2"] == []


async def test_a_trainer_goes_once_its_run_has_let_it_go(drained, monkeypatch):
    await drained.arrive("trainer", "t1")
    monkeypatch.setattr(drained.fleet, "run_of", lambda incarnation: "sums-1")
    await drained.coordinator.instance_changes.drain("trainer-0", "key")
    drained.fleet.sweep_once()
    assert drained.heard["t1"] == [] and drained.states() == {"t1": "DRAINING"}
    monkeypatch.setattr(drained.fleet, "run_of", lambda incarnation: "")  # The run was paused, or has ended.
    drained.fleet.sweep_once()
    drained.fleet.sweep_once()
    assert drained.heard["t1"] == [("drain", DRAIN_S)]


async def test_a_command_that_was_lost_with_its_session_is_sent_again(drained):
    await drained.arrive("reward", "s1")
    await drained.coordinator.instance_changes.drain("reward-0", "key")
    drained.attach("s1")
    drained.fleet.sweep_once()
    assert drained.heard["s1"] == [("drain", DRAIN_S)]


async def test_who_cannot_be_told_is_refused(drained):
    await drained.arrive("rollout", "r1")
    with pytest.raises(Refused, match="did you mean rollout-0") as unknown:
        await drained.coordinator.instance_changes.drain("rolout-0", "key")
    drained.fleet.sessions.clear()
    with pytest.raises(Refused, match="not connected") as away:
        await drained.coordinator.instance_changes.drain("rollout-0", "key")
    assert (unknown.value.reason, away.value.reason) == ("NOT_FOUND", "UNAVAILABLE")
    assert not drained.event_log.state.instances["r1"].draining
