"""A wire between two services that breaks as a test says: cut in one direction or both, slow, sliced, reset.

A TCP proxy on the loopback, in this process. Bytes are held, never changed: TLS and HTTP/2 inside stay whole.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

READ_BYTES = 64 * 1024


class Wire:
    """From `address`, which a caller is given, to another server. Faults count from the moment they are set."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = (host, int(port))
        self.address = ""
        self.delay_s = 0.0
        """Of each piece, in each direction."""
        self.slices: tuple[int, ...] = ()
        """Sizes in which bytes arrive, one after the other and again: at the edges of messages, or inside them."""
        self.passed = {"up": 0, "down": 0}
        """Bytes towards the server, and back."""
        self.opened = 0
        """Connections that a caller has made."""
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._limits: dict[str, int] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.mend()

    def cut(self, *directions: str) -> None:
        """Nothing passes any more, in "up", "down" or both; nobody is told, and new connections stand still too."""
        for direction in directions or ("up", "down"):
            self._open[direction].clear()

    def mend(self) -> None:
        """All passes again, what was held first."""
        for each in self._open.values():
            each.set()

    def reset(self) -> None:
        """Ends all connections by a reset."""
        for pair in self._pairs:
            for writer in pair:
                found = writer.get_extra_info("socket")
                with suppress(OSError):
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

    def reset_after(self, direction: str, size: int) -> None:
        """Resets them once so many more bytes have passed."""
        self._limits[direction] = self.passed[direction] + size

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._came, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Ends everything."""
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        try:
            there_reads, there_writes = await asyncio.open_connection(*self._to)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, there_writes)
        self._pairs.add(pair)
        ways = (self._pass("up", reader, there_writes), self._pass("down", there_reads, writer))
        tasks = [asyncio.create_task(way) for way in ways]
        self._tasks.update(tasks)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.difference_update(tasks)
        self._pairs.discard(pair)
        for each in pair:
            each.close()

    async def _pass(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sizes = self._sizes()
        with suppress(ConnectionError):
            while data := await reader.read(next(sizes)):
                await self._open[direction].wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.passed[direction] + len(data) >= self._limits.get(direction, 1 << 62):
                    del self._limits[direction]
                    self.reset()
                    return
                writer.write(data)
                await writer.drain()
                self.passed[direction] += len(data)

    def _sizes(self) -> Iterator[int]:
        turn = 0
        while True:
            yield self.slices[turn % len(self.slices)] if self.slices else READ_BYTES
            turn += 1


@asynccontextmanager
async def wire(to: str) -> AsyncIterator[Wire]:
    """A wire to a server's host:port."""
    made = Wire(to)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
