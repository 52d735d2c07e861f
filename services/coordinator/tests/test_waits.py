"""A run that stands still says whose answer it waits for."""

import asyncio

import pytest
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.workers.clients import SILENCE_S, WatchedInstanceClient
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_coordinator.waits import Waits, WaitTimeout
from headrace_schema.progress import Progress


class Silent:
    """A port whose instance answers when it is told to."""

    def __init__(self):
        self.answer = asyncio.Event()

    async def call(self, method, request, timeout):
        await self.answer.wait()
        return "done"

    async def stream(self, method, requests, timeout):
        yield "first"
        await self.answer.wait()
        yield "second"


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def waits(clock):
    return Waits(lambda: clock[0])


async def test_a_silent_call_becomes_a_named_wait(clock, waits):
    port = Silent()
    call = asyncio.ensure_future(
        WatchedInstanceClient(port, waits, "run", "rollout-0", "rollout").call("Wake", None, 120)
    )
    await asyncio.sleep(0)
    assert waits.of("run") == [], "an answer may take a moment"
    clock[0] = SILENCE_S + 2
    assert waits.of("run") == ["rollout-0 to answer Wake, for 10 s"]
    clock[0] = 185.0
    assert waits.of("run") == ["rollout-0 to answer Wake, for 180 s"]
    port.answer.set()
    assert await call == "done" and waits.of("run") == []


async def test_a_call_that_takes_long_is_a_stage_that_is_shown_and_told_of_at_its_end(clock):
    ended, port = [], Silent()
    waits = Waits(lambda: clock[0], lambda *told: ended.append(told))
    client = WatchedInstanceClient(port, waits, "run", "trainer-0", "trainer")
    calls = [
        asyncio.ensure_future(client.call(method, None, 120)) for method in ("Restore", "SaveCheckpoint")
    ]
    await asyncio.sleep(0)
    assert waits.stages("run") == [], "the tiny model takes no time"
    clock[0] = 5.0
    assert waits.stages("run") == [
        "trainer-0 loads model and optimizer, for 4 s",
        "trainer-0 writes a checkpoint, for 4 s",
    ]
    clock[0] = 45.0
    assert waits.of("run") == [] and "for 40 s" in waits.stages("run")[0]
    waits.progress["trainer-0"] = Progress(1_200_000_000, 4_800_000_000, "bytes")
    assert waits.stages("run")[0].endswith("for 40 s: 25%, 1.2 of 4.8 GB, about 135 s left")
    waits.progress["trainer-0"] = Progress(3, 10, "steps", "loss 0.5")
    assert waits.stages("run")[0].endswith(": 30%, 3 of 10 steps, about 105 s left, loss 0.5")
    waits.progress["trainer-0"] = Progress(12000, 0, "rows")
    assert waits.stages("run")[0].endswith("for 40 s: 12,000 rows")
    waits.progress["trainer-0"] = None
    port.answer.set()
    await asyncio.gather(*calls)
    assert waits.stages("run") == []
    assert ended == [("run", "trainer-0 loads model and optimizer", 45.0)], (
        "of a checkpoint its own event tells"
    )


async def test_a_stage_that_fails_or_is_quick_is_not_told_of(clock):
    ended: list[tuple[object, ...]] = []
    waits = Waits(lambda: clock[0], lambda *told: ended.append(told))
    with waits.stage("run", "quick"):
        clock[0] += 1
    with pytest.raises(KeyError), waits.stage("run", "fails"):
        clock[0] += 9
        raise KeyError
    assert ended == [] and waits.stages("run") == []


async def test_a_stream_is_silent_between_two_responses_only(clock, waits):
    port = Silent()
    responses = WatchedInstanceClient(port, waits, "run", "rollout-0", "rollout").stream(
        "Generate", None, 120
    )
    assert await anext(responses) == "first"
    clock[0] = SILENCE_S + 2
    assert waits.of("run") == [], "nobody asks for the next response"
    waiting = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    clock[0] += SILENCE_S
    assert waits.of("run") == ["rollout-0 to answer Generate, for 10 s"]
    port.answer.set()
    assert await waiting == "second" and waits.of("run") == []


async def test_a_wait_ends_with_what_it_waits_for_and_another_ones_fault_is_its_own():
    event_log, found, turns = EventLog(MemoryStore(), lambda: 0.0), [], []

    def looks():
        turns.append(1)
        if found == ["broken"]:
            raise KeyError("the run is gone")
        return False

    faulty = asyncio.ensure_future(event_log.wait_until(looks, 60, "a fault"))
    patient = asyncio.ensure_future(event_log.wait_until(lambda: bool(found), 60, "news"))
    for _ in range(3):
        event_log.wake()
        await asyncio.sleep(0)
    assert len(turns) >= 3 and not patient.done(), "the waiter looks at each wake"
    found.append("broken")
    event_log.wake()
    with pytest.raises(KeyError, match="the run is gone"):
        await asyncio.wait_for(faulty, 5)
    await asyncio.wait_for(patient, 5)
    with pytest.raises(WaitTimeout, match="for what never comes"):
        await event_log.wait_until(lambda: False, 0.01, "what never comes")


async def test_the_first_failure_ends_the_other_parts():
    ended = []

    async def waits_for_ever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("other")

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await gather_all(waits_for_ever(), fails())
    assert ended == ["other"]
