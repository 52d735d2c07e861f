"""Connections to an instance that nobody can reach, carried by one call that it makes: both ends of it.

The coordinator listens in the instance's place and numbers who connects; bytes pass unread, so that encryption is
between the caller and the instance. A call that ends takes its connections along.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc.aio
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc

from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.addresses import host_port, listening, split_address
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.rpc.tls import COORDINATOR_NAME

MOST_CONNECTIONS = 256
"""Of one instance; more are refused."""
_PIECE = 256 * 1024
_WAITING = 16
"""Pieces that wait for the call; a caller who sends more is not read."""
_AGAIN_S = 1.0
_logger = get_logger(__name__)
Piece = Callable[[int, bytes, bool], Awaitable[None]]


class Connections:
    """The numbered connections of one end. `send` passes a piece of one to the other end."""

    def __init__(self, send: Piece) -> None:
        self._send = send
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __contains__(self, number: int) -> bool:
        return number in self._writers

    def __len__(self) -> int:
        return len(self._writers)

    def begin(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on what comes from a connection."""
        self._writers[number] = writer
        task = asyncio.create_task(self._pass_on(number, reader), name=f"connection {number}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def take(self, number: int, data: bytes, ended: bool) -> None:
        """Hands a piece of the other end to its connection; one that is over is none."""
        writer = self._writers.get(number)
        if writer is None:
            return
        with suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        if ended:
            self._end(number)

    async def close(self) -> None:
        """Ends all."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for number in list(self._writers):
            self._end(number)

    def _end(self, number: int) -> None:
        if (writer := self._writers.pop(number, None)) is not None:
            writer.close()

    async def _pass_on(self, number: int, reader: asyncio.StreamReader) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(_PIECE):
                await self._send(number, data, False)
        if number in self._writers:
            self._end(number)
            await self._send(number, b"", True)


async def listen_for(
    requests: AsyncIterator[fleet_pb2.RelayRequest], host: str
) -> AsyncGenerator[fleet_pb2.RelayResponse]:
    """The coordinator's end: listens at `host` while the call lasts, at the port of before where it is free."""
    first = await anext(aiter(requests), None)
    if first is None:
        return
    outbox: asyncio.Queue[fleet_pb2.RelayResponse | None] = asyncio.Queue(_WAITING)
    numbers = iter(range(1, 1 << 62))

    async def send(number: int, data: bytes, ended: bool) -> None:
        await outbox.put(fleet_pb2.RelayResponse(connection=number, data=data, ended=ended))

    connections = Connections(send)

    async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= MOST_CONNECTIONS:
            writer.close()
            return
        number = next(numbers)
        await send(number, b"", False)
        connections.begin(number, reader, writer)

    async def read() -> None:
        try:
            async for each in requests:
                await connections.take(each.connection, each.data, each.ended)
        finally:
            await outbox.put(None)

    wanted = int(split_address(first.address)[1]) if first.address else 0
    server = await asyncio.start_server(came, sock=_listening(host, wanted), limit=_PIECE)
    reading = asyncio.create_task(read(), name="relayed pieces")
    try:
        port = server.sockets[0].getsockname()[1]
        yield fleet_pb2.RelayResponse(address=host_port(host, port))
        while (response := await outbox.get()) is not None:
            yield response
    finally:
        server.close()
        reading.cancel()
        closing = asyncio.gather(reading, connections.close(), return_exceptions=True)
        while not closing.done():  # whoever waits for room in the outbox must not wait for ever
            while not outbox.empty():
                outbox.get_nowait()
            await asyncio.sleep(0)


def _listening(host: str, port: int) -> socket.socket:
    try:
        return listening(host, port)
    except OSError:
        return listening(host, 0)


class Relay:
    """The instance's end: keeps a call to the coordinator, until its task is cancelled."""

    def __init__(self, coordinator: str, token: str | None, own: str) -> None:
        self._coordinator, self._token = coordinator, token
        self._own = split_address(own)
        """Where this instance listens, on its own host."""
        self.address = ""
        """Where others reach it; empty until the coordinator has said so once."""

    async def run(self, on_address: Callable[[str], None]) -> None:
        """Connects again and again. `on_address` hears each time where the instance is reached from then on."""
        while True:
            try:
                await self._relay(on_address)
                why = "the coordinator ended it"
            except (grpc.aio.AioRpcError, ServiceError) as error:
                why = message_of(error)
            _logger.warning(
                "no relay through the coordinator", extra={"coordinator": self._coordinator, "why": why}
            )
            await asyncio.sleep(_AGAIN_S)

    async def _relay(self, on_address: Callable[[str], None]) -> None:
        async with dial(self._coordinator, token=self._token, name=COORDINATOR_NAME) as channel:
            stub: Any = fleet_pb2_grpc.FleetServiceStub(channel)  # type: ignore[no-untyped-call]
            call, turn = stub.Relay(), asyncio.Lock()

            async def send(number: int, data: bytes, ended: bool) -> None:
                async with turn:
                    with suppress(asyncio.InvalidStateError):  # the call is over: who reads it learns why
                        await call.write(fleet_pb2.RelayRequest(connection=number, data=data, ended=ended))

            connections = Connections(send)
            try:
                await call.write(fleet_pb2.RelayRequest(address=self.address))
                async for response in call:
                    if response.address:
                        self.address = response.address
                        on_address(response.address)
                        continue
                    number = response.connection
                    if number not in connections and not response.data and not response.ended:
                        await self._begin(connections, number, send)
                    else:
                        await connections.take(number, response.data, response.ended)
            finally:
                call.cancel()
                await connections.close()

    async def _begin(self, connections: Connections, number: int, send: Piece) -> None:
        host, port = self._own
        try:
            connections.begin(number, *await asyncio.open_connection(host, int(port), limit=_PIECE))
        except OSError:
            await send(number, b"", True)
