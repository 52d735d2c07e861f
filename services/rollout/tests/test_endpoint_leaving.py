"""Callers who leave, and requests that are sent again: what is cancelled, what stays, and who gets which answer."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest
from endpoint_desk import CHAT, user

BODIES = {
    CHAT: {"messages": [user("one")]},
    "/v1/completions": {"prompt": "one"},
    "/v1/responses": {"input": "one"},
}


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # whatever it is, it is not told
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def asked(desk, session, path, body, **headers):
    """A request over a real connection, which is closed at the end."""
    url = httpx.URL(await desk.endpoint.url())
    reader, writer = await asyncio.open_connection(url.host, url.port)
    data = json.dumps(body).encode()
    head = {
        "Host": url.host,
        "Authorization": f"Bearer {session.api_key}",
        "Content-Length": len(data),
        **headers,
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + data)
    try:
        yield reader
    finally:
        writer.close()


@pytest.fixture
async def served(desk):
    yield desk
    await desk.endpoint.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_whose_caller_leaves_is_ended_and_nothing_of_it_stays(served, path, stream, n):
    session, speaker = served.open("yes", "no", "so")
    speaker.waits.clear()
    more = {"n": n} if n > 1 and path != "/v1/responses" else {}
    count = n if more else 1
    async with asked(served, session, path, {**BODIES[path], "stream": stream, **more}):
        await until(lambda: len(speaker.asked) == count)
        assert session.exchanges.under_way
    await until(lambda: speaker.stopped == count and not session.exchanges.under_way)
    assert not session.talk.turns and not session._branches._branches
    speaker.waits.set()
    # The same request again, without a word: there is one line, as if the first had never been.
    assert (await served.post(session, BODIES[path], path)).status_code == 200
    assert len(session.talk.turns) == 1 and [branch.spans[0][0] for branch in session.join().branches] == [3]


async def test_of_several_choices_none_stays_where_one_was_ended(served):
    session, speaker = served.open("yes", "no")
    say = speaker.say

    async def second_waits(asked):
        if asked.turn == 1:
            speaker.waits.clear()
        return await say(asked)

    speaker.say = second_waits
    async with asked(served, session, CHAT, {"messages": [user("one")], "n": 2}):
        await until(lambda: len(speaker.asked) == 2)
    await until(lambda: speaker.stopped >= 1 and not session.exchanges.under_way)
    assert not session.talk.turns and not session.join().messages


async def test_a_caller_who_leaves_takes_nothing_from_one_who_waits_for_the_same(served):
    session, speaker = served.open("yes")
    speaker.waits.clear()
    body = {"messages": [user("one")]}
    async with asked(served, session, CHAT, body):
        await until(lambda: speaker.asked)
        again = asyncio.create_task(served.post(session, body, **{"x-stainless-retry-count": "1"}))
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.05)
    speaker.waits.set()
    assert (await again).json()["choices"][0]["message"]["content"] == "yes"
    assert (len(speaker.asked), len(session.talk.turns), speaker.stopped) == (1, 1, 0)


async def test_requests_of_one_key_are_one_request(served):
    session, speaker = served.open("yes", "no")
    speaker.waits.clear()
    body, key = {"messages": [user("one")]}, {"Idempotency-Key": "a"}
    both = [asyncio.create_task(served.post(session, body, **key)) for _ in range(2)]
    await until(lambda: speaker.asked)
    speaker.waits.set()
    first, second = [(await each).json() for each in both]
    third = (await served.post(session, body, **key)).json()
    assert first["choices"] == second["choices"] == third["choices"] and first["id"] == third["id"]
    assert (len(speaker.asked), len(session.talk.turns)) == (1, 1)
    error = await served.refused(session, {"messages": [user("two")]}, **key)
    assert "Idempotency-Key" in error["message"]
    await served.post(session, body, **{"Idempotency-Key": "b"})
    assert len(session.talk.turns) == 2, "another key is another request"


async def test_a_failed_request_of_a_key_may_be_sent_again(served):
    session, speaker = served.open("yes")
    key = {"Idempotency-Key": "a"}
    await served.refused(session, {"messages": []}, **key)
    assert (await served.post(session, {"messages": [user("one")]}, **key)).status_code == 200
    assert len(session.talk.turns) == 1 and len(speaker.asked) == 1
