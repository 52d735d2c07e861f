"""Connections over one two-way stream. It runs at both ends, so the standard library of Python 3.7 is all it has.

A frame is the connection's number, its kind, and bytes with their length. Each side sends at most WINDOW bytes of a
connection that the other has not taken yet, so that one that is not read stops no other.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from typing import Any, Awaitable, Callable  # noqa: UP035  # of Python 3.7

OPEN, DATA, END, RESET, TAKEN, READY = range(6)
WINDOW = 1 << 18
PIECE = 1 << 15
MOST = 64
"""Connections at once."""
_HEADER = struct.Struct(">IBI")


class Channel:
    """One connection."""

    def __init__(self, channels: Channels, number: int) -> None:
        self._channels, self._number = channels, number
        self._room, self._more = WINDOW, asyncio.Event()
        self.come: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.held = 0

    async def read(self) -> bytes:
        """What has come; empty at its end. Raises ConnectionError where the other end broke it off."""
        data = await self.come.get()
        if data is None:
            raise ConnectionError("broken off")
        if data:
            self.held -= len(data)
            await self._channels.send(self._number, TAKEN, struct.pack(">I", len(data)))
        return data

    async def write(self, data: bytes) -> None:
        """Sends, as the other end takes it."""
        for at in range(0, len(data), PIECE):
            piece = data[at : at + PIECE]
            while self._room < len(piece):
                self._more.clear()
                await self._more.wait()
            self._room -= len(piece)
            await self._channels.send(self._number, DATA, piece)

    async def end(self) -> None:
        """Says that nothing more is sent."""
        await self._channels.send(self._number, END, b"")

    async def close(self) -> None:
        """Breaks it off, and forgets it."""
        if self._channels.open.pop(self._number, None) is not None:
            await self._channels.send(self._number, RESET, b"")

    def taken(self, size: int) -> None:
        """The other end has taken so many bytes."""
        self._room += size
        self._more.set()


class Channels:
    """The connections of a stream; `opened` serves those that the other end opens, and without it there are none."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        send_bytes: Callable[[bytes], Awaitable[None]],
        opened: Callable[[Channel, int], Awaitable[None]] | None,
    ) -> None:
        self._reader, self._send_bytes, self._opened = reader, send_bytes, opened
        self._next, self._sending = 1, asyncio.Lock()
        self._tasks: set[asyncio.Future[None]] = set()
        self.open: dict[int, Channel] = {}
        self.ready = asyncio.Event()

    async def send(self, number: int, kind: int, data: bytes) -> None:
        """Sends a frame."""
        async with self._sending:
            await self._send_bytes(_HEADER.pack(number, kind, len(data)) + data)

    async def connect(self, port: int) -> Channel | None:
        """Opens a connection that came in at a port; None where there are too many."""
        if len(self.open) >= MOST:
            return None
        number, self._next = self._next, self._next + 1
        self.open[number] = channel = Channel(self, number)
        await self.send(number, OPEN, struct.pack(">H", port))
        return channel

    async def serve(self) -> None:
        """Takes frames until the stream ends, or breaks the protocol."""
        try:
            while True:
                number, kind, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
                if size > WINDOW:
                    return
                self._take(number, kind, await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, OSError, struct.error):
            return
        finally:
            for channel in self.open.values():
                channel.come.put_nowait(None)
            for task in list(self._tasks):
                task.cancel()

    def _take(self, number: int, kind: int, data: bytes) -> None:
        if kind == READY:
            self.ready.set()
        elif kind == OPEN and self._opened and number not in self.open and len(self.open) < MOST:
            self.open[number] = channel = Channel(self, number)
            task = asyncio.ensure_future(self._opened(channel, *struct.unpack(">H", data)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif number in self.open:
            channel = self.open[number]
            if kind == DATA:
                channel.held += len(data)
                channel.come.put_nowait(data if channel.held <= WINDOW else None)
            elif kind == END:
                channel.come.put_nowait(b"")
            elif kind == TAKEN:
                channel.taken(*struct.unpack(">I", data))
            elif kind == RESET:
                del self.open[number]
                channel.come.put_nowait(None)


async def joined(channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carries bytes both ways until both have ended, or one is broken off; then both are closed."""

    async def outwards() -> None:
        while True:
            data = await reader.read(PIECE)
            if not data:
                await channel.end()
                return
            await channel.write(data)

    async def inwards() -> None:
        while True:
            data = await channel.read()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    tasks = [asyncio.ensure_future(outwards()), asyncio.ensure_future(inwards())]
    try:
        await asyncio.gather(*tasks)
    except (ConnectionError, OSError, RuntimeError):
        pass
    finally:
        for task in tasks:
            task.cancel()
        writer.close()
        await channel.close()


async def relay(ports: list[int]) -> None:
    """Listens at ports of the loopback device, and carries what connects over standard input and output."""
    loop = asyncio.get_event_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    out = asyncio.StreamWriter(transport, protocol, None, loop)

    async def send_bytes(data: bytes) -> None:
        out.write(data)
        await out.drain()

    channels = Channels(reader, send_bytes, None)

    def listen(port: int) -> Any:
        async def came(client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = await channels.connect(port)
            if channel is None:
                writer.close()
            else:
                await joined(channel, client, writer)

        return asyncio.start_server(came, "127.0.0.1", port)

    for port in ports:
        await listen(port)
    await channels.send(0, READY, b"")
    await channels.serve()
