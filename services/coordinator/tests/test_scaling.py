"""Scale commands: one for each Idempotency-Key, and the supervisor's refusal with its figures."""

import asyncio

import pytest
from headrace_coordinator.api.http import make_app
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.app import Coordinator
from headrace_coordinator.domain.state import restore, snapshot
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.lease_manager import LeaseManager
from headrace_coordinator.fleet.sessions import FleetSettings, Supervisor
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from httpx import ASGITransport, AsyncClient

FULL = "scale rollout=999: this host can hold 7 rollout processes (0.73 GiB each measured)"


class Scaled:
    """A coordinator with one imaginary supervisor, which answers when `answering` is set."""

    def __init__(self, tmp_path):
        self.event_log = EventLog(MemoryStore(), lambda: 0.0)
        self.fleet = Fleet(self.event_log, lambda kind, address, incarnation: None, FleetSettings())
        self.coordinator = Coordinator(self.event_log, self.fleet, tmp_path)
        self.commands = []
        self.answering = asyncio.Event()
        self.answering.set()
        self.error = ""
        self._tasks = set()

    async def open(self):
        await self.event_log.open("test", None)
        self._start(self.event_log.run())
        self.fleet.supervised(Supervisor("h", self._hear, frozenset({"rollout"})))

    def _start(self, work):
        task = asyncio.create_task(work)
        self._tasks.add(task)

    def _hear(self, command, body):
        self.commands.append((command, *body[1:]))
        self._start(self._answer(body[0]))

    async def _answer(self, request):
        await self.answering.wait()
        self.coordinator.instance_changes.answered(request, self.error)

    async def close(self):
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def scaled(tmp_path):
    made = Scaled(tmp_path)
    await made.open()
    yield made
    await made.close()


async def test_twenty_parallel_calls_with_one_key_are_one_command(scaled):
    scaled.answering.clear()
    calls = [
        asyncio.create_task(scaled.coordinator.instance_changes.scale("rollout", 3, "key")) for _ in range(20)
    ]
    await asyncio.sleep(0.05)
    with pytest.raises(Refused, match="was used for another request") as other:
        await scaled.coordinator.instance_changes.scale("rollout", 4, "key")
    scaled.answering.set()
    assert await asyncio.gather(*calls) == [3] * 20
    assert scaled.commands == [("scale", "rollout", 3)] and other.value.reason == "CONFLICT"


async def test_a_key_outlives_the_command_and_a_restart(scaled):
    await scaled.coordinator.instance_changes.scale("rollout", 3, "key")
    scaled.event_log.state = restore(snapshot(scaled.event_log.state))
    assert await scaled.coordinator.instance_changes.scale("rollout", 3, "key") == 3
    assert len(scaled.commands) == 1
    with pytest.raises(Refused) as other:
        await scaled.coordinator.instance_changes.scale("rollout", 2, "key")
    assert other.value.reason == "CONFLICT"
    assert await scaled.coordinator.instance_changes.scale("rollout", 2, "other key") == 2
    assert len(scaled.commands) == 2


async def test_a_key_of_another_write_is_a_conflict(scaled):
    await scaled.coordinator.instance_changes.scale("rollout", 3, "key")
    with pytest.raises(Refused) as other:
        scaled.coordinator.instance_changes._keys.made("key", "the digest of a spec")
    assert other.value.reason == "CONFLICT"


async def test_a_refusal_is_422_names_the_key_and_records_nothing(scaled, tmp_path):
    scaled.error = FULL
    app = make_app(scaled.coordinator, runs_directory=tmp_path)
    headers = {"Idempotency-Key": "key"}
    async with AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1") as client:
        refused = await client.post("/v1/services/rollout:scale", json={"count": 999}, headers=headers)
        scaled.error = ""
        fewer = await client.post("/v1/services/rollout:scale", json={"count": 7}, headers=headers)
    assert (refused.status_code, refused.json()["reason"], refused.json()["message"]) == (
        422,
        "INVALID",
        FULL,
    )
    assert refused.json()["problems"][0]["key"] == "count"
    assert (fewer.status_code, fewer.json()["count"]) == (200, 7)


async def test_a_caller_that_goes_away_takes_no_other_caller_along(scaled):
    scaled.answering.clear()
    gone = asyncio.create_task(scaled.coordinator.instance_changes.scale("rollout", 3, "key"))
    stays = asyncio.create_task(scaled.coordinator.instance_changes.scale("rollout", 3, "key"))
    await asyncio.sleep(0.05)
    gone.cancel()
    scaled.answering.set()
    assert await stays == 3 and len(scaled.commands) == 1


async def test_nobody_to_ask_is_unavailable_for_the_time_of_a_start_alone(scaled, monkeypatch):
    for lenient, reason in ((True, "UNAVAILABLE"), (False, "CONFLICT")):
        monkeypatch.setattr(LeaseManager, "lenient", property(lambda _, now=lenient: now))
        with pytest.raises(Refused, match="no connected supervisor") as refused:
            await scaled.coordinator.instance_changes.scale("trainer", 2, "key")
        assert refused.value.reason == reason
    assert "`headrace up`" in refused.value.message


async def test_of_several_hosts_one_is_named(scaled):
    told = []

    def other(command, body):
        told.append((command, *body[1:]))
        scaled.coordinator.instance_changes.answered(body[0], "")

    scaled.fleet.supervised(Supervisor("g", other, frozenset({"rollout"})))
    scale = scaled.coordinator.instance_changes.scale
    with pytest.raises(Refused, match=r"say which \(g, h\)") as refused:
        await scale("rollout", 2, "key")
    assert refused.value.problems[0].key == "host"
    with pytest.raises(Refused, match="no host 'f'"):
        await scale("rollout", 2, "key", "f")
    assert await scale("rollout", 2, "key", "g") == 2
    assert told == [("scale", "rollout", 2)] and scaled.commands == []
    with pytest.raises(Refused) as conflict:
        await scale("rollout", 2, "key", "h")
    assert conflict.value.reason == "CONFLICT", "the same number on another host is another command"
