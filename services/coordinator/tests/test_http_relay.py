"""The one address of a run's endpoint: a caller who leaves it is told to the instance, and keys of requests go on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import pytest
import uvicorn
from headrace_coordinator.api.http.relay import Relay
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route


@contextlib.asynccontextmanager
async def serving(*routes):
    """An application on a port of its own."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=list(routes)), log_level="warning", lifespan="off")
    )
    task = asyncio.create_task(server._serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


@pytest.mark.parametrize("streams", [False, True])
async def test_a_caller_who_leaves_is_gone_at_the_instance_too(streams):
    asked, gone, keys = asyncio.Event(), asyncio.Event(), []

    async def endless():
        yield b"data: 1\n\n"
        await asyncio.sleep(60)

    async def answer(request):
        await request.body()
        keys.append(request.headers.get("idempotency-key"))
        asked.set()
        if streams:

            async def pieces():
                try:
                    async for piece in endless():
                        yield piece
                finally:
                    gone.set()

            return StreamingResponse(pieces())
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        return JSONResponse({})

    async with serving(Route("/v1/chat/completions", answer, methods=["POST"])) as instance:
        reads = SimpleNamespace(endpoints=lambda run: [f"http://127.0.0.1:{instance}/v1"])
        async with serving(Relay(SimpleNamespace(reads=reads)).route) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = (
                "POST /v1/runs/r/endpoint/v1/chat/completions HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\n"
            )
            writer.write(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
            async with asyncio.timeout(20):
                await asked.wait()
                if streams:
                    await reader.readuntil(b"data: 1")
                writer.close()
                await gone.wait()
    assert keys == ["k"]
