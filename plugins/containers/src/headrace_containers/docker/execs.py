"""Commands in a container. A shell that waits ahead of each one saves the engine's 40 ms of starting a process."""

from __future__ import annotations

import shlex
import socket
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from headrace_containers.commands import KILL, MARK, MOST_DROPPED, Collected, check
from headrace_containers.docker.engine import Engine
from headrace_containers.provider import BadSpec, ContainerLost, Output, Ran

_HEADER = struct.Struct(">BxxxL")
_PIECE, _POLL_S, _LINGER_S, _KILL_S = 1 << 16, 0.2, 0.1, 5.0
_LONGEST_LINE = 16_384
_WAIT_FOR_LINE = ["/bin/sh", "-c", 'IFS= read -r line && eval "$line"']
_NO_FOLDER = 125


class Stream:
    """The two-way stream of an exec or of an attached container."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.socket: socket.socket = getattr(raw, "_sock", raw)
        self._ahead = bytearray()

    def send(self, data: bytes, *, ends: bool = False) -> None:
        """Sends to standard input, and closes it where it `ends`."""
        self.socket.settimeout(None)
        self.socket.sendall(data)
        if ends:
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)

    def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        """The stream's number and the next piece; None at the end. Raises TimeoutError."""
        while True:
            if len(self._ahead) > _HEADER.size:
                number, size = _HEADER.unpack_from(self._ahead)
                piece = bytes(self._ahead[_HEADER.size : _HEADER.size + size])
                if len(piece) == size or len(piece) >= _PIECE:
                    del self._ahead[: _HEADER.size + len(piece)]
                    if len(piece) < size:
                        self._ahead[:0] = _HEADER.pack(number, size - len(piece))
                    return number, piece
            self.socket.settimeout(max(timeout_s, 1e-3))
            data = self.socket.recv(_PIECE)
            if not data:
                return None
            self._ahead += data

    def close(self) -> None:
        """Closes it at once, for the engine too."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self.socket.close()
        if (response := getattr(self._raw, "_response", None)) is not None:
            response.close()


@dataclass
class _Started:
    """A command that runs: its exec's id at the engine, its mark, and its stream."""

    id: str
    mark: str
    user: str
    stream: Stream


class Execs:
    """The commands of one container, one at a time."""

    def __init__(self, engine: Engine, container: str, user: str) -> None:
        self._engine, self._container, self._user = engine, container, user
        self._waiting: _Started | None = None

    def wait_ahead(self) -> None:
        """Starts the shell that waits for the next command. Raises as `run`."""
        if self._waiting is None:
            self._waiting = self._start(_WAIT_FOR_LINE, self._user, stdin=True)

    def run(
        self,
        command: Sequence[str],
        stdin: bytes,
        cwd: str,
        env: Mapping[str, str],
        user: str,
        timeout_s: float,
        most_bytes: int,
        on_output: Output | None,
    ) -> Ran:
        """Runs a command to its end, with everything said. Raises BadSpec, ContainerLost."""
        check(command, env)
        begun = time.monotonic()
        started = self._begin(command, stdin, cwd, env, user or self._user)
        try:
            found = Collected(most_bytes, on_output)
            ended = self._follow(started, found, begun + timeout_s)
            if ended != "exit":
                started.stream.close()  # what it still prints would hold up the engine
                self._kill(started)
            code = self._exit_code(started, time.monotonic() + _KILL_S)
        finally:
            started.stream.close()
        if code == _NO_FOLDER and b"cd: " in found.stderr and not found.stdout:
            raise BadSpec("cwd", f"the container has no folder {cwd}")
        return Ran(
            137 if ended != "exit" else code,
            bytes(found.stdout),
            bytes(found.stderr),
            ended,
            found.left_out,
            time.monotonic() - begun,
        )

    def close(self) -> None:
        """Closes the stream of the shell that waits."""
        if self._waiting is not None:
            self._waiting.stream.close()

    def _begin(
        self, command: Sequence[str], stdin: bytes, cwd: str, env: Mapping[str, str], user: str
    ) -> _Started:
        waiting, line = None, _line(command, cwd, env)
        if user == self._user and len(line) < _LONGEST_LINE:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            try:
                waiting.stream.send(line + stdin, ends=True)
                return waiting
            except OSError:  # somebody has killed it
                waiting.stream.close()
        started = self._start(
            ["/bin/sh", "-c", line.decode(errors="surrogateescape")], user, stdin=bool(stdin)
        )
        if stdin:
            with suppress(OSError):  # it may end without having read
                started.stream.send(stdin, ends=True)
        return started

    def _start(self, command: Sequence[str], user: str, *, stdin: bool) -> _Started:
        mark = uuid.uuid4().hex
        with self._engine.asked("a command cannot be started"):
            made = self._engine.api.exec_create(
                self._container,
                list(command),
                stdin=stdin,
                user=user,
                environment={MARK: mark},
                workdir="/",
            )
            raw = self._engine.api.exec_start(made["Id"], socket=True)
        return _Started(made["Id"], mark, user, Stream(raw))

    def _follow(self, started: _Started, found: Collected, late: float) -> Literal["exit", "time", "output"]:
        """Reads the output until the command has ended, or has to be."""
        idle = False
        while (left := late - time.monotonic()) > 0:
            try:
                piece = started.stream.receive(min(left, _LINGER_S if idle else _POLL_S))
            except TimeoutError:
                if idle:
                    return "exit"  # what it left in the background holds its output open
                idle = not self._inspect(started)["Running"]
                continue
            if piece is None:
                return self._closed(started, late)
            found.add(*piece)
            if found.left_out > MOST_DROPPED:
                return "output"
        return "time"

    def _closed(self, started: _Started, late: float) -> Literal["exit", "time"]:
        """Waits for a command that has closed its output."""
        pause = 0.001
        while self._inspect(started)["Running"]:
            if time.monotonic() > late:
                return "time"
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S)
        return "exit"

    def _inspect(self, started: _Started) -> dict[str, Any]:
        with self._engine.asked("a command cannot be looked after"):
            found: dict[str, Any] = self._engine.api.exec_inspect(started.id)
        return found

    def _exit_code(self, started: _Started, late: float) -> int:
        """Raises ContainerLost for a command that does not end."""
        while (found := self._inspect(started))["Running"]:
            if time.monotonic() > late:
                raise ContainerLost("a command could not be killed, so its container was")
            time.sleep(0.01)
        if not found["Pid"]:  # it never was
            raise BadSpec("user", f"the container knows no user {started.user!r}, or has no /bin/sh")
        return int(found["ExitCode"] if found["ExitCode"] is not None else 137)

    def _kill(self, started: _Started) -> None:
        """Kills all processes of a command. Where no process can be started for that, nothing is killed."""
        killer = self._start(["/bin/sh", "-c", KILL, "kill", started.mark], started.user, stdin=False)
        late = time.monotonic() + _KILL_S
        try:
            with suppress(TimeoutError):
                while killer.stream.receive(late - time.monotonic()) is not None and time.monotonic() < late:
                    pass
        finally:
            killer.stream.close()


def _line(command: Sequence[str], cwd: str, env: Mapping[str, str]) -> bytes:
    """One line for a shell that becomes the command."""
    words = [f"cd {_quoted(cwd)} || exit {_NO_FOLDER}" if cwd else ":"]
    words += [f"{name}={_quoted(value)}; export {name}" for name, value in env.items()]
    words.append("exec " + " ".join(map(_quoted, command)))
    text = "N=$(printf '\\nx'); N=${N%x}; " + "; ".join(words)
    return text.encode(errors="surrogateescape") + b"\n"


def _quoted(word: str) -> str:
    return shlex.quote(word).replace("\n", "'\"$N\"'")
