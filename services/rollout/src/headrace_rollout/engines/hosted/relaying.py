"""A broadcast that reaches the GPU of an engine's worker: the worker joins it, and hands the pieces to its instance.

NCCL wants a process with a GPU, which an instance of vLLM or SGLang is not. A thread of each worker listens at a socket
that only this user can open; an instance asks one of them for its place in a broadcast, and gives it two rooms of
shared memory. The pieces come down to these rooms, and the instance verifies and keeps them as from any other way,
beside the engine's work. Knows no engine.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace_modelkit.broadcasting import BUCKET_BYTES, NCCL, Broadcasts
from headrace_modelkit.pinned import flat_bytes, pin
from typing_extensions import override

RELAYS = "HEADRACE_RELAYS"
"""The variable that tells an engine's workers in which directory to listen."""
ROOM_BYTES = BUCKET_BYTES[NCCL]
ANSWER_S = 30.0
SUFFIX = ".relay"
_LINE_BYTES = 4096


class Relayed(Broadcasts):
    """An instance's part in broadcasts: NCCL in one of its engine's workers, Gloo in this process.

    `directory` tells where the workers listen, or None while the engine is not up.
    """

    def __init__(self, directory: Callable[[], Path | None]) -> None:
        super().__init__()
        self._directory = directory

    @override
    def device_id(self) -> str:
        """Of a worker that answers; empty where none does."""
        for path in self._sockets():
            with suppress(OSError), _dial(path):
                return path.stem
        return ""

    @override
    def join(self, host: str, port: int, key: str, rank: int, size: int, backend: str, own_host: str) -> Any:
        """As `Broadcasts.join`. Raises RuntimeError where the worker is gone."""
        if backend != NCCL:
            return super().join(host, port, key, rank, size, backend, own_host)
        for path in self._sockets():
            with suppress(OSError):
                return _Relay(_dial(path), [host, port, key, rank, size, backend, own_host])
        raise RuntimeError("no worker of the engine answers")

    def _sockets(self) -> Sequence[Path]:
        directory = self._directory()
        return sorted(directory.glob(f"*{SUFFIX}")) if directory is not None else ()


class _Relay:
    """The instance's side of one broadcast."""

    def __init__(self, connection: socket.socket, where: Sequence[Any]) -> None:
        self._connection, self._where = connection, where

    def receive(self) -> Iterator[memoryview]:
        """The pieces; each holds until the one after the next is asked for. Raises RuntimeError."""
        rooms = os.memfd_create("headrace-relay")
        os.ftruncate(rooms, 2 * ROOM_BYTES)
        body = memoryview(mmap.mmap(rooms, 2 * ROOM_BYTES))  # Closed with the last piece.
        with self._connection as connection:
            try:
                socket.send_fds(connection, [json.dumps(self._where).encode()], [rooms])
            finally:
                os.close(rooms)
            with connection.makefile("r") as lines:
                for index, line in enumerate(lines):
                    told = json.loads(line)
                    if isinstance(told, str):
                        raise RuntimeError(f"the engine's worker: {told}")
                    if not told:
                        return
                    first = index % 2 * ROOM_BYTES
                    yield body[first : first + told]
                    if index:
                        connection.sendall(b".")  # the room of the piece before
        raise RuntimeError("the engine's worker has ended")


def listen(broadcasts: Broadcasts) -> None:
    """Has a thread of this worker take part in broadcasts, where its instance wants that and its GPU can."""
    name, directory = broadcasts.device_id(), os.environ.get(RELAYS)
    if not name or not directory:
        return
    path = Path(directory) / f"{name}{SUFFIX}"
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        while True:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                _relay(connection, broadcasts)

    threading.Thread(target=serve, name="relay", daemon=True).start()


def _relay(connection: socket.socket, broadcasts: Broadcasts) -> None:
    """One broadcast. An instance that goes away ends it; one that only looks gets nothing."""
    asked, handles, _, _ = socket.recv_fds(connection, _LINE_BYTES, 1)
    if not asked or not handles:
        return
    with os.fdopen(handles[0], "r+b") as file:
        try:
            mapped = memoryview(mmap.mmap(file.fileno(), 2 * ROOM_BYTES))
            with pin(flat_bytes(mapped)) as flat:
                _pass_on(
                    connection,
                    broadcasts.join(*json.loads(asked)).receive([flat[:ROOM_BYTES], flat[ROOM_BYTES:]]),
                )
            _say(connection, 0)
        except (RuntimeError, ValueError, TypeError) as error:
            _say(connection, str(error))


def _pass_on(connection: socket.socket, pieces: Iterator[memoryview]) -> None:
    for index, piece in enumerate(pieces):
        _say(connection, len(piece))
        if index and not connection.recv(1):
            raise OSError("the instance has gone")


def _say(connection: socket.socket, what: int | str) -> None:
    connection.sendall(f"{json.dumps(what)}\n".encode())


def _dial(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
