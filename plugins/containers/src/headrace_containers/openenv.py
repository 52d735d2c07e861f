"""Environments of OpenEnv by their image: `environment: {backend: container, tasks: [openenv]}`.

Each environment has a container of its own, in which the image's server runs over many episodes. Nothing outside can
reach a port of a container, so each connection is made from inside: a small program of the image's Python connects to
the server and to its container's endpoint, which is a socket of this process, and carries bytes between both.
"""

from __future__ import annotations

import http.client
import io
import posixpath
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
from headrace_environments.openenv import KIND, OpenEnv, OpenEnvOptions
from headrace_environments.servers import Server, ServerLost
from headrace_simulator.backends.base import BackendError, Message, Tool
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from typing_extensions import override

from headrace_containers.options import ContainerOptions, refusal
from headrace_containers.provider import ENDPOINT_PORT, Container, ContainerError, Spec

_LOG = posixpath.join("/tmp", "headrace-server.log")
"""In the container: what its server prints."""
_SERVE = (
    '{ { "$@" 2>&1 </dev/null; echo "[ended with exit code $?]"; : >"$0.ended"; } | '
    '{ dd bs=1024 count=120 of="$0"; cat >/dev/null; }; } >/dev/null 2>&1 &'
)
"""Runs the server in the background and keeps the begin of what it prints."""
_CARRY = """
import os, socket, sys, threading, time
token, port, outside, seconds, log = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
late = time.monotonic() + seconds
while True:
    try:
        server = socket.create_connection(("127.0.0.1", port), 1)
        break
    except OSError as error:
        if os.path.exists(log + ".ended"):
            sys.exit("its server has ended")
        if time.monotonic() > late:
            sys.exit("no server answers at its port %d within %g s (%s)" % (port, seconds, error))
        time.sleep(0.02)
caller = socket.create_connection(("127.0.0.1", outside), 10)
caller.sendall(token.encode())
server.settimeout(None)
caller.settimeout(None)
if os.fork():
    os._exit(0)
nothing = os.open(os.devnull, os.O_RDWR)
for number in range(3):
    os.dup2(nothing, number)

def carry(source, sink):
    try:
        while True:
            data = source.recv(65536)
            if not data:
                break
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, sink):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

back = threading.Thread(target=carry, args=(server, caller))
back.start()
carry(caller, server)
back.join()
"""
_NO_PYTHON = (126, 127)
_SHOWN = 500
"""Characters of the server's output that an error shows."""
_MORE_S = 15.0
"""Beside the server's own time: that of an engine under load."""


class ServedOptions(ContainerOptions, OpenEnvOptions):
    """Options of `openenv`: those of a container, and those of an environment behind a server of OpenEnv."""

    port: PositiveInt = Field(8000, le=65535, description="where the server listens in its container")
    command: list[str] = Field(
        default_factory=list, description="what starts the server; default: what the image says to run"
    )
    start_s: PositiveFloat = Field(60.0, description="seconds in which the server has to answer")
    warm: NonNegativeInt = Field(
        0, le=16, description="containers that are started before they are asked for"
    )


class ServedInContainer(Server):
    """A server in a container of its own, which is started as it is first dialled, and again when it is lost."""

    fix = "name an image of OpenEnv, or its `port`"

    def __init__(self, options: ServedOptions, start: Callable[[Spec], Container]) -> None:
        super().__init__(KIND, f"http://localhost:{options.port}", options)
        if not options.image and options.build is None:
            raise BackendError(
                "options_json.image", "give an image of OpenEnv, or `build`, a folder with its Dockerfile"
            )
        self.name = options.image or str(options.build)
        self.key = "options_json.image" if options.image else "options_json.build"
        self._given, self._start = options, start
        self._container: Container | None = None
        self._started = 0.0
        self._listening = socket.create_server(("127.0.0.1", 0))

    def open(self) -> None:
        """Starts the container and its server. Raises BackendError for what cannot be had so."""
        try:
            self._begin()
            self._stream(self._given.start_s).close()
        except (ContainerError, ServerLost) as error:
            said = self._said()
            self.close()
            if isinstance(error, ContainerError):
                raise refusal(error) from error
            fix = f"correct the image, `command` or `port`, or raise `start_s`{said}"
            raise BackendError(self.key, f"{self.name}: {error}; {fix}") from error
        except BackendError:
            self.close()
            raise

    @override
    def dial(self) -> socket.socket:
        try:
            if self._container is not None:
                with suppress(ContainerError, ServerLost):  # it is gone: the next one
                    return self._stream(self._options.request_timeout_s)
            self._begin()
            return self._stream(self._given.start_s)
        except (ContainerError, ServerLost) as error:
            said = self._said()
            self.close()
            raise ServerLost(f"{KIND} of {self.name}: {error}{said}") from error

    @override
    def client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            headers=self._options.headers,
            transport=_Dialled(self.dial, self._options.request_timeout_s),
        )

    def is_old(self) -> bool:
        """Whether its container has half of its time behind it: an episode that begins has the other half."""
        return time.monotonic() - self._started > self._given.limits.wall_s / 2

    def close(self) -> None:
        """Ends the container."""
        if self._container is not None:
            self._container.close()
        self._container = None

    def _begin(self) -> None:
        self.close()
        options, port = self._given, self._listening.getsockname()[1]
        container = self._container = self._start(options.spec(endpoint=f"127.0.0.1:{port}"))
        self._started = time.monotonic()
        command = (*options.command,) or container.command
        if not command:
            raise BackendError(
                "options_json.command", f"{self.name} does not say what starts its server; give its `command`"
            )
        container.exec(("/bin/sh", "-c", _SERVE, _LOG, *command), timeout_s=_MORE_S)

    def _stream(self, seconds: float) -> socket.socket:
        """A connection with the server. Raises ServerLost where it does not answer within the seconds."""
        assert self._container is not None
        token, given = secrets.token_hex(16), self._given
        program = (token, str(given.port), str(ENDPOINT_PORT), str(seconds), _LOG)
        ran = self._container.exec(("python3", "-c", _CARRY, *program), cwd="/", timeout_s=seconds + _MORE_S)
        if ran.exit_code in _NO_PYTHON:
            raise BackendError(self.key, f"{self.name} has no python3, by which its server is reached")
        if ran.exit_code:
            reason = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise ServerLost(reason or f"it is not reached within {seconds:g} s")
        late = time.monotonic() + _MORE_S
        while (left := late - time.monotonic()) > 0:
            self._listening.settimeout(left)
            try:
                stream, _ = self._listening.accept()
            except TimeoutError:
                break
            stream.settimeout(left)
            with suppress(OSError), stream.makefile("rb", buffering=0) as first:
                if secrets.compare_digest(_exactly(first, len(token)), token.encode()):
                    stream.settimeout(None)
                    return stream
            stream.close()
        raise ServerLost("its container's endpoint is not carried")

    def _said(self) -> str:
        """The end of what the server has printed, for an error."""
        with suppress(ContainerError):
            if self._container is not None:
                said = self._container.read(_LOG, most_bytes=1 << 17).decode(errors="replace").strip()
                return f" (it printed: …{said[-_SHOWN:]})" if said else " (it printed nothing)"
        return ""


def _exactly(stream: io.RawIOBase, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := stream.read(size - len(data))):
        data += piece
    return data


class _Dialled(httpx.BaseTransport):
    """Each request on a connection of its own."""

    def __init__(self, dial: Callable[[], socket.socket], timeout_s: float) -> None:
        self._dial, self._timeout_s = dial, timeout_s

    @override
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        connection = http.client.HTTPConnection(request.url.host)
        try:
            connection.sock = self._dial()
            connection.sock.settimeout(self._timeout_s)
            headers = {**request.headers, "connection": "close"}
            connection.request(request.method, request.url.raw_path.decode(), request.read(), headers)
            answer = connection.getresponse()
            kept = [
                (name, value) for name, value in answer.getheaders() if name.lower() != "transfer-encoding"
            ]
            return httpx.Response(answer.status, headers=kept, content=answer.read())
        except (OSError, http.client.HTTPException, ServerLost) as error:
            raise httpx.TransportError(str(error) or type(error).__name__) from error
        finally:
            connection.close()


class Served(OpenEnv):
    """One environment, and its container. Raises BackendError for what cannot be had."""

    def __init__(self, options: ServedOptions, start: Callable[[Spec], Container]) -> None:
        self._own = ServedInContainer(options, start)
        self._own.open()
        try:
            super().__init__(self._own, options)
        except ServerLost as lost:
            self._own.close()
            raise BackendError(self._own.key, str(lost)) from lost
        except BackendError:
            self._own.close()
            raise

    @override
    def reset(
        self, seed: int, item: Mapping[str, Any]
    ) -> Sequence[Message] | tuple[Sequence[Message], Sequence[Tool]]:
        if self._own.is_old():
            self.close()
            self._own.close()
        return super().reset(seed, item)
