"""Which instances a run gets."""

import pytest
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import FleetSettings, Supervisor
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore


@pytest.fixture
async def fleet():
    event_log = EventLog(MemoryStore(), lambda: 0.0)
    await event_log.open("test", None)
    return Fleet(event_log, lambda kind, address, incarnation: None, FleetSettings())


def arrive(fleet, name, incarnation):
    fleet.event_log.state.instances[incarnation] = InstanceState(
        instance=name,
        incarnation=incarnation,
        kind="rollout",
        host="h",
        address="",
        devices=[],
        capabilities={},
    )
    fleet.attach(incarnation, lambda command, body: None)


def table(send, *incarnations):
    return Supervisor("h", send, incarnations=frozenset(incarnations))


async def test_a_supervisors_table_is_compared_at_every_connection(fleet):
    arrive(fleet, "rollout-a", "a1")
    arrive(fleet, "rollout-b", "b1")
    first, second = (lambda command, body: None), (lambda command, body: None)
    fleet.supervised(table(first, "a1", "b1"))
    fleet.supervised(table(first, "a1"))
    assert fleet.alive("b1"), "the same connection tells each end by itself"
    fleet.supervised(table(second, "a1"))  # it opened before the end of the first was noticed
    assert fleet.alive("a1") and not fleet.alive("b1")
    assert list(fleet.event_log.state.instances) == ["a1"]


async def test_a_step_tells_what_became_of_sessions_since_the_last_one(fleet):
    """A client that asks again for its lost session is the same loss."""
    sessions = fleet.online["a-run"]
    sessions.end({"taken": 2, "stale": 1})
    for lost in ("here-1", "here-1", "here-2"):
        sessions.lose(lost)
    assert sessions.figures() == {"sessions_lost": 2.0, "sessions_stale": 1.0, "sessions_taken": 2.0}
    sessions.end({"taken": 3})
    assert sessions.figures() == {"sessions_taken": 3.0} and sessions.figures() == {}
    assert sessions.ended == {"taken": 5, "stale": 1, "lost": 2}
