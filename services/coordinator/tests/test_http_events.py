"""Server-sent events over a real server: nothing missed or doubled, alive while silent, ended at the end."""

import asyncio
import contextlib
import json
import socket

import httpx
import pytest
from headrace_coordinator import serving
from headrace_servicekit import http_server


@pytest.fixture
async def http(served, monkeypatch):
    """A real server on a free port."""
    monkeypatch.setattr(http_server, "UNREAD_S", 1.0)
    monkeypatch.setattr(http_server, "HEAD_S", 0.4)
    listening = serving.listen("127.0.0.1", 0)
    http = http_server.make_server(served.app, timeout_graceful_shutdown=1)
    served = asyncio.create_task(http_server.serve(http, listening))
    while not http.started:  # noqa: ASYNC110  uvicorn has no event to wait for
        await asyncio.sleep(0.01)
    yield http
    http.should_exit = http.force_exit = True
    await served
    listening.close()


@pytest.fixture
def server(http):
    """Its URL."""
    return f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"


@pytest.fixture
async def run_id(server, spec_json):
    async with httpx.AsyncClient(base_url=server) as client:
        return (await client.post("/v1/runs", json=spec_json)).json()["id"]


@contextlib.asynccontextmanager
async def listening_to(server, run_id, **request):
    """Lines of an event stream."""
    async with httpx.AsyncClient(base_url=server, timeout=5) as client:
        async with client.stream("GET", f"/v1/runs/{run_id}/events", **request) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            yield response.aiter_lines()


async def ids(lines, count: int | None = None) -> list[int]:
    """Ids of the next events, of all until the end where no count is given."""
    found = []
    async for line in lines:
        if line.startswith("id: "):
            found.append(int(line[4:]))
            if len(found) == count:
                break
    return found


async def all_ids(server, run_id) -> list[int]:
    """Ids of the whole stream of a run that has ended."""
    async with listening_to(server, run_id) as lines:
        return await ids(lines)


async def test_a_stream_carries_every_event_and_ends_with_the_run(server, run_id, served):
    async with listening_to(server, run_id) as lines:
        assert await anext(lines) == "retry: 1000"
        assert await anext(lines) == ""
        first = [await anext(lines) for _ in range(3)]
        assert first[0].startswith("id: ") and first[1] == "event: run_submitted"
        assert json.loads(first[2].removeprefix("data: "))["run"] == run_id
        await served.note(run_id, "two\nlines\r\n\u2028")
        await served.end(run_id, "SUCCEEDED")
        rest = [line async for line in lines]
    told = [line.removeprefix("event: ") for line in rest if line.startswith("event:")]
    assert told == ["noted", "run_state_changed", "run_state_changed", "run_state_changed"]
    data = [json.loads(line[6:]) for line in rest if line.startswith("data: ")]
    assert data[0]["data"]["text"] == "two\nlines\r\n\u2028"


async def test_a_reconnect_gets_exactly_the_missing_events(server, run_id, served):
    for _ in range(5):
        await served.note(run_id)
    async with listening_to(server, run_id) as lines:
        seen = await ids(lines, 3)
    await served.note(run_id)
    async with listening_to(server, run_id, headers={"Last-Event-ID": str(seen[-1])}) as lines:
        seen += await ids(lines, 2)
    await served.end(run_id, "FAILED")
    # The header of a reconnecting client wins over the address that it was given first.
    async with listening_to(
        server, run_id, headers={"Last-Event-ID": str(seen[-1])}, params={"after": 1}
    ) as lines:
        seen += await ids(lines)
    assert seen == await all_ids(server, run_id) and len(seen) == 9
    for after in (4, 8):
        async with listening_to(server, run_id, params={"after": seen[after]}) as lines:
            assert await ids(lines) == seen[after + 1 :]


async def test_silence_is_filled_with_comments(server, run_id):
    async with listening_to(server, run_id) as lines:
        assert await ids(lines, 1)
        assert (await anext(lines)).startswith("event")
        assert (await anext(lines)).startswith("data")
        comments = [line for _ in range(6) if (line := await anext(lines))]
    assert set(comments) == {": alive"}


async def test_a_client_that_leaves_frees_its_stream(server, run_id, served):
    closed = asyncio.Event()
    events = served.coordinator.past.events

    async def watched(*arguments, **options):
        try:
            async for event in events(*arguments, **options):
                yield event
        finally:
            closed.set()

    served.coordinator.past.events = watched
    async with listening_to(server, run_id) as lines:
        await anext(lines)
        assert not closed.is_set()
    async with asyncio.timeout(5):
        await closed.wait()


async def test_a_reader_that_never_reads_is_cut_off_and_goes_on_from_its_last_id(server, run_id, served):
    """It takes no more than what buffers hold, and is not waited for."""
    taken, closed = [], asyncio.Event()
    events = served.coordinator.past.events

    async def watched(*arguments, **options):
        try:
            async for event in events(*arguments, **options):
                taken.append(event.id)
                yield event
        finally:
            closed.set()

    served.coordinator.past.events = watched
    host, port = server.removeprefix("http://").split(":")
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect((host, int(port)))
        reader.sendall(f"GET /v1/runs/{run_id}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        for _ in range(400):
            await served.note(run_id, "x" * 60_000)
        async with asyncio.timeout(10):
            await closed.wait()
        assert len(taken) < 200, "what a reader leaves unread is bounded"
        head = reader.recv(4096)
        with pytest.raises(ConnectionError):
            while reader.recv(1 << 20):
                pass
    assert f"id: {taken[0]}\n".encode() in head
    served.coordinator.past.events = events
    await served.end(run_id, "SUCCEEDED")
    async with listening_to(server, run_id, headers={"Last-Event-ID": str(taken[0])}) as lines:
        assert len(await ids(lines)) == 400 + 3


async def test_a_connection_that_sends_no_whole_request_is_ended_and_a_stream_is_not(server, run_id, served):
    async with listening_to(server, run_id) as lines:
        await anext(lines)
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server).port)
        writer.write(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        await served.end(run_id, "SUCCEEDED")
        assert len(await ids(lines)) == 4
    writer.close()


@pytest.mark.parametrize("given", ["x", "-1", "1.5", str(2**63), "9" * 5000])
async def test_a_wrong_place_to_go_on_from_is_named(server, run_id, given):
    async with httpx.AsyncClient(base_url=server) as client:
        header = await client.get(f"/v1/runs/{run_id}/events", headers={"Last-Event-ID": given})
        query = await client.get(f"/v1/runs/{run_id}/events", params={"after": given})
    assert (header.status_code, query.status_code) == (422, 422)
    assert [answer.json()["problems"][0]["key"] for answer in (header, query)] == ["last-event-id", "after"]


async def test_a_stream_that_is_not_to_follow_ends_with_what_there_is(server, run_id, served):
    await served.note(run_id)
    async with asyncio.timeout(5), listening_to(server, run_id, params={"follow": "false"}) as lines:
        found = await ids(lines)
    await served.end(run_id, "CANCELLED")
    every = await all_ids(server, run_id)
    assert found and found == every[: len(found)] and len(every) > len(found)


async def test_many_streams_of_one_run_see_the_same(server, run_id, served):
    async def listen() -> list[int]:
        async with listening_to(server, run_id) as lines:
            return await ids(lines)

    listeners = [asyncio.create_task(listen()) for _ in range(20)]
    await asyncio.sleep(0.1)
    for _ in range(10):
        await served.note(run_id)
    await served.end(run_id, "CANCELLED")
    assert await asyncio.gather(*listeners) == [await all_ids(server, run_id)] * 20


@pytest.mark.parametrize("bound", ["MAX_STREAMS", "MAX_OF_CLIENT"])
async def test_open_streams_are_bounded_and_a_closed_one_makes_room(server, run_id, monkeypatch, bound):
    monkeypatch.setattr(f"headrace_coordinator.api.http.routes.events.{bound}", 2)
    async with httpx.AsyncClient(base_url=server) as client, listening_to(server, run_id) as first:
        await anext(first)
        async with listening_to(server, run_id) as second:
            await anext(second)
            refused = await client.get(f"/v1/runs/{run_id}/events")
            assert (refused.status_code, refused.json()["reason"]) == (503, "UNAVAILABLE")
        async with asyncio.timeout(5):
            while (await _status(client, run_id)) == 503:  # noqa: ASYNC110  as a client would
                await asyncio.sleep(0.02)


async def _status(client: httpx.AsyncClient, run_id: str) -> int:
    async with client.stream("GET", f"/v1/runs/{run_id}/events") as response:
        return response.status_code
