"""Containers as a child of the simulator has them: through its broker, which alone can reach an engine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from typing_extensions import override

from headrace_containers import wire
from headrace_containers.files import packed_folder
from headrace_containers.provider import (
    MIB,
    BadPath,
    BadSpec,
    Container,
    ContainerLost,
    EngineLost,
    File,
    Output,
    Ran,
    Spec,
)

BROKER_VARIABLE = "HEADRACE_BROKER"
"""The folder of the broker's socket."""
_SPEC = TypeAdapter(Spec)


@dataclass(frozen=True)
class Source:
    """Where containers come from: a provider with its options, and how many are kept ready for the next ones."""

    provider: str = "docker"
    options: Mapping[str, Any] = field(default_factory=dict)
    warm: int = 0
    folder: Path | None = None
    """Of the broker; default: that of this process."""

    def prepare(self, spec: Spec) -> None:
        """See `Provider.prepare`. Raises BadSpec, EngineLost."""
        connection = self._connected()
        try:
            _asked(connection, self._asks("prepare", spec), _context(spec))
        finally:
            connection.close()

    def start(self, spec: Spec) -> RemoteContainer:
        """Starts a container. Raises BadSpec, EngineLost, ContainerLost."""
        connection = self._connected()
        try:
            header, _ = _asked(connection, self._asks("start", spec), _context(spec))
        except BaseException:
            connection.close()
            raise
        return RemoteContainer(connection, str(header["id"]), tuple(header["command"]))

    def _asks(self, what: str, spec: Spec) -> dict[str, Any]:
        given = _SPEC.dump_python(replace(spec, build=None, context=b""), mode="json")
        return {
            "ask": what,
            "provider": self.provider,
            "options": dict(self.options),
            "warm": self.warm,
            "spec": given,
        }

    def _connected(self) -> socket.socket:
        folder = self.folder or os.environ.get(BROKER_VARIABLE)
        if not folder:
            raise EngineLost(
                "no broker of containers runs beside this process; simulators start one for their children"
            )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(Path(folder) / wire.SOCKET))
        except OSError as error:
            connection.close()
            raise EngineLost(
                f"the broker of containers does not answer: {error.strerror or error}"
            ) from error
        return connection


class RemoteContainer(Container):
    """A container that a broker has; the connection with it is the container's life."""

    def __init__(self, connection: socket.socket, id: str, command: tuple[str, ...] = ()) -> None:
        self.id, self.command = id, command
        self._connection = connection

    @override
    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout_s: float = 60.0,
        most_bytes: int = MIB,
        on_output: Output | None = None,
    ) -> Ran:
        options = {
            "cwd": cwd,
            "env": dict(env or {}),
            "user": user,
            "timeout_s": timeout_s,
            "most_bytes": most_bytes,
        }
        self._send({"ask": "exec", "command": list(command), "options": options}, stdin)
        outputs = {1: bytearray(), 2: bytearray()}
        while True:
            header, piece = self._received()
            if (number := header.get("stream")) is None:
                return Ran(stdout=bytes(outputs[1]), stderr=bytes(outputs[2]), **header)
            outputs[number] += piece
            if on_output is not None:
                on_output(number, piece)

    @override
    def write(self, files: Sequence[File], *, user: str = "") -> None:
        if sum(len(file.data) for file in files) > wire.MOST_BYTES // 2:
            raise BadPath(f"more than {wire.MOST_BYTES // 2} bytes at once; write them in several calls")
        listed = [(file.path, len(file.data), file.mode) for file in files]
        self._send({"ask": "write", "files": listed, "user": user}, b"".join(file.data for file in files))
        self._received()

    @override
    def read(self, path: str, *, most_bytes: int = 64 * MIB) -> bytes:
        self._send({"ask": "read", "path": path, "most_bytes": most_bytes})
        return self._received()[1]

    @override
    def read_folder(self, path: str, *, most_bytes: int = 64 * MIB) -> Iterator[File]:
        # All has come before the first file is given.
        self._send({"ask": "read_folder", "path": path, "most_bytes": most_bytes})
        found = []
        while "over" not in (header := (received := self._received())[0]):
            found.append(File(header["path"], received[1], header["mode"]))
        return iter(found)

    @override
    def close(self) -> None:
        with suppress(OSError):  # whoever waits for an answer is woken by it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _send(self, header: Mapping[str, Any], payload: bytes = b"") -> None:
        try:
            wire.send(self._connection, header, payload)
        except wire.Closed as error:
            raise ContainerLost(f"the broker of containers ended: {error}") from error

    def _received(self) -> tuple[dict[str, Any], bytes]:
        try:
            header, payload = wire.receive(self._connection)
        except wire.Closed as error:
            raise ContainerLost(f"the broker of containers ended: {error}") from error
        wire.raise_error(header)
        return header, payload


def _context(spec: Spec) -> bytes:
    """What an image is built of: this process reads it, with its own rights, and no broker. Raises BadSpec."""
    if spec.build is None:
        return spec.context
    if not (spec.build / "Dockerfile").is_file():
        raise BadSpec("build", f"there is no {spec.build / 'Dockerfile'}")
    if len(packed := packed_folder(spec.build)) > wire.MOST_BYTES // 2:
        raise BadSpec(
            "build", f"{spec.build} has more than {wire.MOST_BYTES // 2} bytes; build of a smaller folder"
        )
    return packed


def _asked(
    connection: socket.socket, header: Mapping[str, Any], payload: bytes
) -> tuple[dict[str, Any], bytes]:
    try:
        wire.send(connection, header, payload)
        answer = wire.receive(connection)
    except wire.Closed as error:
        raise EngineLost(f"the broker of containers ended: {error}") from error
    wire.raise_error(answer[0])
    return answer


def start(spec: Spec, provider: str = "docker", options: Mapping[str, Any] | None = None) -> RemoteContainer:
    """Starts a container by the broker of this process. Raises BadSpec, EngineLost, ContainerLost."""
    return Source(provider, options or {}).start(spec)
