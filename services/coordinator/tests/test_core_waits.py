"""A run that stands still says whose answer it waits for."""

import asyncio

import pytest
from headrace_coordinator.fleet.waits import Waits
from headrace_coordinator.run.watched_port import SILENCE_S, WatchedPort


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
    call = asyncio.ensure_future(WatchedPort(port, waits, "run", "rollout-0").call("Wake", None, 120))
    await asyncio.sleep(0)
    assert waits.of("run") == [], "an answer may take a moment"
    clock[0] = SILENCE_S + 2
    assert waits.of("run") == ["rollout-0 to answer Wake, for 10 s"]
    clock[0] = 185.0
    assert waits.of("run") == ["rollout-0 to answer Wake, for 180 s"]
    port.answer.set()
    assert await call == "done" and waits.of("run") == []


async def test_a_stream_is_silent_between_two_responses_only(clock, waits):
    port = Silent()
    responses = WatchedPort(port, waits, "run", "rollout-0").stream("Generate", None, 120)
    assert await anext(responses) == "first"
    clock[0] = SILENCE_S + 2
    assert waits.of("run") == [], "nobody asks for the next response"
    waiting = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    clock[0] += SILENCE_S
    assert waits.of("run") == ["rollout-0 to answer Generate, for 10 s"]
    port.answer.set()
    assert await waiting == "second" and waits.of("run") == []
