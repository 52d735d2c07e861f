"""A worker's network of its own: nothing but a loopback, at which its service listens and carries what it may reach.

A socket stays in the network that it was made in, whoever holds it: the worker makes two that listen, hands them to its
service and keeps none.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from headrace_servicekit.contained.proxy import Hosts, Streams

PROXY_PORT, ENDPOINT_PORT = 3128, 3129
"""In the worker's network: the proxy to hosts that an admin lists, and the endpoint of the agent that runs."""
CONTAINED_VARIABLE, ENDPOINT_VARIABLE = "HEADRACE_CONTAINED", "HEADRACE_ENDPOINT"
"""Set in a contained worker; HOST:PORT of the endpoint outside, for an agent's container."""
_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_MOST = 64
_PIECE = 1 << 16
_STARTING_S = 60.0


def enter_network() -> bool:
    """A network of this process's own, with a loopback; False where the kernel or a container allows none."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NEWNET) != 0:
        return False
    with socket.socket() as asked:
        given = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(asked, _SIOCGIFFLAGS, given))[1]
        fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
    return True


def hand_over(link: int) -> None:
    """Gives this network's listening sockets to the service at the other end of a socket, and closes it."""
    listening = [
        socket.create_server(("127.0.0.1", port), backlog=_MOST) for port in (PROXY_PORT, ENDPOINT_PORT)
    ]
    with socket.socket(fileno=link) as channel:
        socket.send_fds(channel, [b"."], [each.fileno() for each in listening])
    for each in listening:
        each.close()


class Outlet:
    """The service's side, for one worker: what its code reaches. Serves until `close`."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.endpoint: tuple[str, int] | None = None
        """Of the agent that runs; nothing is reached there while there is none."""
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.link = self._theirs.fileno()
        """Descriptor that the worker hands its sockets over by."""
        self._serving = asyncio.create_task(self._serve(), name="outlet of a worker")
        self._serving.add_done_callback(lambda _: self._ours.close())

    def started(self) -> None:
        """The worker has the descriptor, and the service needs it no more."""
        self._theirs.close()

    def close(self) -> None:
        """Ends it, and what it carries."""
        self._theirs.close()
        self._serving.cancel()

    async def _serve(self) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_STARTING_S):
                await _readable(self._ours)
            _, handles, _, _ = socket.recv_fds(self._ours, 1, 2)
            with suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    for handle, serve in zip(handles, (self._by_proxy, self._to_endpoint), strict=True):
                        listening = socket.socket(fileno=handle)
                        listening.setblocking(False)
                        group.create_task(_accept(listening, serve))

    async def _by_proxy(
        self, reader: asyncio.StreamReader, write: Callable[[bytes], Awaitable[None]]
    ) -> Streams | None:
        return await self._hosts.request(lambda: reader.read(_PIECE), write)

    async def _to_endpoint(self, reader: asyncio.StreamReader, write: object) -> Streams | None:
        return await asyncio.open_connection(*self.endpoint) if self.endpoint else None


async def _accept(
    listening: socket.socket, serve: Callable[..., Coroutine[Any, Any, Streams | None]]
) -> None:
    loop, places = asyncio.get_running_loop(), asyncio.Semaphore(_MOST)
    with listening:
        async with asyncio.TaskGroup() as group:
            while True:
                await places.acquire()
                connection, _ = await loop.sock_accept(listening)
                group.create_task(_carry(connection, serve)).add_done_callback(lambda _: places.release())


async def _carry(
    connection: socket.socket, serve: Callable[..., Coroutine[Any, Any, Streams | None]]
) -> None:
    inner, back = await asyncio.open_connection(sock=connection)  # it closes the socket

    async def write(data: bytes) -> None:
        back.write(data)
        await back.drain()

    with suppress(OSError):
        try:
            if (outer := await serve(inner, write)) is not None:
                try:
                    await asyncio.gather(_pump(inner, outer[1]), _pump(outer[0], back))
                finally:
                    outer[1].close()
        finally:
            back.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _readable(channel: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(channel, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(channel)
