"""Streams of messages over a socket of this host, in place of gRPC's round trips: both ends. Knows no service.

A gRPC call stands beside each stream: it says where the socket is, and shows that both sides live and why it ended.
Whoever reaches the socket shows the call's ticket, which comes back from the process that made it up and from no
other: that proves one host.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from headrace_servicekit.logs import get_logger
from headrace_servicekit.process.worker_pipes import BUFFER_BYTES, FrameReader, frame
from headrace_servicekit.rpc.client import MAX_MESSAGE_BYTES
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import decoded, tolerant

_JOIN_S = 10.0
_LAST_S = 1.0
_TICKET_BYTES = 16
_logger = get_logger(__name__)


class LocalStream:
    """One end of a joined stream: bodies of messages, whole and in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.frames = FrameReader(reader, _TICKET_BYTES)
        self._writer = writer

    async def read(self) -> bytes | None:
        """The next body; None at the end. Raises ValueError for a frame that is cut or has a wrong size."""
        try:
            body = await self.frames.next()
        except ConnectionError:
            return None
        if body is None and self.frames.ahead:
            raise ValueError(f"it ended inside a frame, after {len(self.frames.ahead)} bytes")
        return body

    async def write(self, body: bytes) -> None:
        """Sends a body; waits where the other side does not read. Raises ConnectionError once it is gone."""
        self._writer.write(frame(body))
        if self._writer.transport.get_write_buffer_size():
            await self._writer.drain()

    def end(self) -> None:
        """Says that nothing more is written."""
        self._writer.write_eof()

    def close(self) -> None:
        """Ends both directions; repeated calls do nothing."""
        self._writer.close()


class LocalStreams:
    """The socket of a server, in a directory that only its own user enters. `why_not` says why there is none."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "streams"
        self.why_not = "it is not listening"
        self._expected: dict[bytes, asyncio.Future[LocalStream]] = {}
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        """Waits for callers; where that cannot be done, `why_not` says so."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            with _short(self.path) as short:
                listening.bind(short)
            self._server = await asyncio.start_unix_server(self._came, sock=listening, limit=BUFFER_BYTES)
            self.why_not = ""
        except OSError as error:
            listening.close()
            self.why_not = f"no socket can be made at {self.path}: {error}"

    def close(self) -> None:
        """Takes no more callers."""
        if self._server is not None:
            self._server.close()

    @contextmanager
    def expected(self) -> Iterator[tuple[bytes, Awaitable[LocalStream]]]:
        """A ticket, and the stream of the one who shows it; it is closed at the end of the body."""
        ticket = secrets.token_bytes(_TICKET_BYTES)
        joined: asyncio.Future[LocalStream] = asyncio.get_running_loop().create_future()
        self._expected[ticket] = joined
        try:
            yield ticket, joined
        finally:
            self._expected.pop(ticket, None)
            if joined.done() and not joined.cancelled():
                joined.result().close()

    async def _came(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = LocalStream(reader, writer)
        try:
            async with asyncio.timeout(_JOIN_S):
                ticket = await stream.read() or b""
            joined = self._expected.pop(ticket, None)
            if joined is not None and not joined.done():
                await stream.write(ticket)
                stream.frames.most = MAX_MESSAGE_BYTES
                joined.set_result(stream)
                return
        except (TimeoutError, ValueError, ConnectionError):
            pass
        stream.close()


async def in_time(joined: Awaitable[LocalStream]) -> LocalStream:
    """The stream of a caller that joins it. Raises ServiceError NOT_JOINED."""
    try:
        async with asyncio.timeout(_JOIN_S):
            return await joined
    except TimeoutError:
        message = (
            f"nobody joined the socket within {_JOIN_S:g} s; a caller that cannot reach it cancels the call"
        )
        raise ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "NOT_JOINED", message) from None


async def requests_of(stream: LocalStream, read: Callable[[bytes], Any], method: str) -> AsyncIterator[Any]:
    """The messages of a caller, until it ends its side. Raises ServiceError BROKEN_FRAME, and UNDECODABLE as gRPC's."""
    decode = tolerant(read)
    assert decode is not None
    try:
        while (body := await stream.read()) is not None:
            yield decoded(decode(body), method)
    except ValueError as error:
        raise _broken(error) from error


class LocalCall:
    """A joined stream as its caller uses it: like the gRPC call of a stream, whose errors it raises.

    `call` is the gRPC call beside it.
    """

    def __init__(self, call: Any, stream: LocalStream, read: Callable[[bytes], Any]) -> None:
        self._call, self._stream, self._read = call, stream, read
        call.add_done_callback(self._ended)

    async def write(self, request: Any) -> None:
        """Sends a message. What the stream ended with is raised by `read`."""
        try:
            await self._stream.write(request.SerializeToString())
        except ConnectionError:
            pass

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF. Raises grpc.aio.AioRpcError, and ServiceError BROKEN_FRAME."""
        try:
            body = await self._stream.read()
        except ValueError as error:
            self.cancel()
            raise _broken(error) from error
        return self._read(body) if body is not None else await self._call.read()

    async def done_writing(self) -> None:
        """Sends nothing more."""
        self._stream.end()

    def cancel(self) -> bool:
        """Ends both the stream and the call."""
        self._stream.close()
        return bool(self._call.cancel())

    def _ended(self, call: Any) -> None:
        """What was written before the call's end is still read. A side that hangs does not close its socket."""
        asyncio.get_running_loop().call_later(_LAST_S, self._stream.close)


async def nearest(offer: Any, remote: Callable[[], Any], read: Callable[[bytes], Any]) -> Any:
    """The stream that a call offers, joined; where its socket cannot be reached, the gRPC stream of `remote`.

    `offer` is a call whose answer has `socket_path`, `ticket` and `why_not`; `read` makes a message of bytes.
    Raises grpc.aio.AioRpcError.
    """
    answer = await offer.read()
    try:
        if not answer.socket_path:
            raise OSError(answer.why_not)
        return LocalCall(offer, await join(answer.socket_path, answer.ticket), read)
    except (OSError, ValueError) as error:
        _logger.info("a stream goes by gRPC", extra={"why": str(error), "socket": answer.socket_path})
        offer.cancel()
        return remote()


async def join(path: str, ticket: bytes) -> LocalStream:
    """The stream of a ticket. Raises OSError where the socket is not reached, or is another process's."""
    with _short(Path(path)) as short:
        reader, writer = await asyncio.open_unix_connection(short, limit=BUFFER_BYTES)
    stream = LocalStream(reader, writer)
    try:
        async with asyncio.timeout(_JOIN_S):
            await stream.write(ticket)
            if await stream.read() == ticket:
                stream.frames.most = MAX_MESSAGE_BYTES
                return stream
        raise OSError(f"{path} is not the socket of the process that offered it")
    except BaseException:
        stream.close()
        raise


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """The path by its directory's file: the kernel takes 107 bytes of a socket's path."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _broken(error: ValueError) -> ServiceError:
    message = f"the stream over the socket is broken: {error}"
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "BROKEN_FRAME", message)
