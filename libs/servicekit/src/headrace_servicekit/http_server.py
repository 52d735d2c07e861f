"""Bounds of an HTTP server that strangers reach: its connections, heads of requests, and bodies.

An app asks for the key before it reads a body, and then tells `admit` of it: connections that have shown a key are
kept, others make room for them. Knows no route and no key.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import uvicorn

UNREAD_S = 60.0
"""Seconds that a client may leave what was sent to it unread; then the kernel ends the connection (Linux)."""
HEAD_S = 10.0
"""Seconds that a client may take for the head of a request; its connection is ended after 1.5 times that."""
IDLE_S = 5
"""Seconds that a connection without a key may be idle after an answer."""
MOST_CONNECTIONS = 2048
BACKLOG = 128
BODY_START_S, BODY_S, BODY_RATE = 10.0, 120.0, 16 << 10
"""A body must have begun to flow within the first; it takes no longer than the second, at no fewer bytes a second."""
_ADMITTED = "headrace.admit"
_CLOSING = (b"connection", b"close")
_ALWAYS = {b"x-content-type-options": b"nosniff", b"cache-control": b"no-store"}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class BodyRefused(Exception):
    """A request whose body is not read, or no further: HTTP status, code and message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Bodies:
    """What a server reads of bodies: `most` bytes of one, `of_all` of those that arrive at the same time."""

    def __init__(self, most: int, of_all: int) -> None:
        self.most, self.of_all = most, of_all
        self._arriving = 0

    async def read(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
        """The whole body. Raises BodyRefused: too long, too slow, too many, packed, or cut off."""
        self._check(dict(headers))
        body, began = bytearray(), time.monotonic()
        try:
            while True:
                left = began + min(BODY_START_S + len(body) / BODY_RATE, BODY_S) - time.monotonic()
                try:
                    async with asyncio.timeout(left):
                        message = await receive()
                except TimeoutError as error:
                    told = f"the body came too slowly: {len(body)} bytes in {time.monotonic() - began:.0f} s"
                    raise BodyRefused(408, "too_slow", f"{told}; send it at once") from error
                if message["type"] == "http.disconnect":
                    raise BodyRefused(400, "cut_off", "the connection broke before the body had arrived")
                piece = message.get("body", b"")
                body += piece
                self._arriving += len(piece)
                if len(body) > self.most:
                    raise self._too_large()
                if self._arriving > self.of_all:
                    told = f"more than {self.of_all} bytes of requests are arriving at this moment"
                    raise BodyRefused(503, "busy", f"{told}; try again")
                if not message.get("more_body", False):
                    return bytes(body)
        finally:
            self._arriving -= len(body)

    def _check(self, headers: MutableMapping[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self.most:
            raise self._too_large()
        packed = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if packed not in ("", "identity"):
            raise BodyRefused(415, "packed", f"the body is packed ({packed[:40]!r}); send it as it is")

    def _too_large(self) -> BodyRefused:
        return BodyRefused(413, "too_large", f"the body is larger than {self.most} bytes; send less")


def admit(scope: Scope) -> None:
    """Notes that a request has shown a good key: its connection makes no room for others."""
    if (told := scope.get("state", {}).get(_ADMITTED)) is not None:
        told()


def guarded(send: Send, *, closing: bool = False) -> Send:
    """Answers with headers under which no browser guesses a type or keeps a copy; `closing` ends the connection."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = list(message.get("headers", ()))
            names = {name.lower() for name, _ in given}
            given += [each for each in _ALWAYS.items() if each[0] not in names]
            given += [_CLOSING] if closing or message["status"] in (408, 413, 415) else []
            message = {**message, "headers": given}
        await send(message)

    return sent


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket whose connections are ended by the kernel when they leave answers unread. Raises OSError.

    What waits for such a client would stay in memory for ever.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Accepted connections have it from here.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
    try:
        listening.bind((host, port))
        listening.listen(BACKLOG)  # whoever is told of it may connect at once
    except OSError:
        listening.close()
        raise
    return listening


def most_connections() -> int:
    """At most half of the descriptors that the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, soft // 2)


def make_server(app: Any, *, idle_s: int = IDLE_S, **options: Any) -> uvicorn.Server:
    """A uvicorn server of an ASGI app; connections that have shown a key may be idle for `idle_s`.

    It answers no WebSocket, and a head of a request has at most 64 KiB (h11's bound; httptools has none).
    """
    import uvicorn

    config = uvicorn.Config(
        app,
        http=_protocol(most_connections(), idle_s),
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        log_config=None,  # its lines go where all others go, and are counted there
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_S,
        **options,
    )
    return uvicorn.Server(config)


async def serve(server: uvicorn.Server, listening: socket.socket) -> None:
    """Serves until `server.should_exit`, and ends connections that send no whole head of a request."""
    ending = asyncio.create_task(_end_silent(server), name="end silent connections")
    try:
        await server._serve(sockets=[listening])  # Not `serve`: it would take the signal handlers over.
    finally:
        ending.cancel()


def _protocol(most: int, idle_s: int) -> type[asyncio.Protocol]:
    """uvicorn's protocol with at most `most` connections; when there is no room, the oldest without a key goes.

    One peer has at most half of those without a key, so that it does not take the turns of all others.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    strangers: dict[Any, str] = {}
    peers: Counter[str] = Counter()

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.app_state = {**self.app_state, _ADMITTED: self._admitted}
            peer = self.client[0] if self.client else ""
            strangers[self] = peer
            peers[peer] += 1
            if peers[peer] > most // 2:
                next(each for each, other in strangers.items() if other == peer)._drop()
            elif len(self.connections) > most:
                next(iter(strangers))._drop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._known()
            super().connection_lost(exc)

        def _drop(self) -> None:
            self._known()
            self.transport.abort()

        def _known(self) -> None:
            if (peer := strangers.pop(self, None)) is not None:
                peers[peer] -= 1
                if not peers[peer]:
                    del peers[peer]

        def _admitted(self) -> None:
            self._known()
            self.timeout_keep_alive = idle_s

    return Bounded


async def _end_silent(server: uvicorn.Server) -> None:
    """Ends connections on which a head of a request, or a body that nobody reads, takes too long."""
    seen: dict[Any, tuple[Any, int]] = {}
    while True:
        await asyncio.sleep(HEAD_S / 2)
        connections: set[Any] = server.server_state.connections  # type: ignore[assignment]
        waiting = [each for each in connections if _waits(each)]
        before, seen = seen, {}
        for each in waiting:
            cycle, times = before.get(each, (each.cycle, 0))
            seen[each] = each.cycle, times + 1 if cycle is each.cycle else 1
            if seen[each][1] > 2:
                each.transport.abort()


def _waits(connection: Any) -> bool:
    """Whether a connection has neither a request in hand nor is idle after an answer."""
    answered = connection.cycle is None or connection.cycle.response_complete
    return answered and connection.timeout_keep_alive_task is None


T = TypeVar("T")
LEFT_STATUS = 499
"""Status in logs of a request whose caller has left."""


class CallerLeft(Exception):
    """The caller's connection was closed before its answer was there."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled where the caller leaves first. Raises CallerLeft then.

    `receive` is the request's, whose body was read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerLeft
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
