"""A worker: a child process for other people's code. Start, send, receive within a limit, kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from headrace_servicekit.process.spawn import TREE_VARIABLE, descendants, kill_tree
from headrace_servicekit.process.worker_pipes import (
    HIDDEN_VARIABLE,
    LENGTH,
    MEMORY_VARIABLE,
    PARENT_VARIABLE,
    Codec,
    Message,
    checked_size,
    frame,
)

_REAP_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 1.0
# Messages may be megabytes; the default of 64 KiB would take them in small bites.
_BUFFER_BYTES = 4 * 1024 * 1024
# After a limit has passed: a reply that lies in the pipe counts, however late this process got to read it.
_GRACE_S = 0.05


_secrets: list[Path] = []


def hide_from_workers(*secrets: Path) -> None:
    """Workers with users' code that are started from now on cannot read these files; see `spawn.hide_files`."""
    _secrets[:] = [path.absolute() for path in secrets]


class WorkerGone(Exception):
    """The worker ended, or broke the protocol; the message says how."""


class WorkerTimeout(Exception):
    """The worker did not reply within the limit."""


@dataclass
class Worker(Generic[Message]):
    """One running worker. `start` makes it, and its owner calls `kill`."""

    codec: Codec[Message]
    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    tree: str = ""
    """Of the worker and all that it starts, daemons too; see `spawn.TREE_VARIABLE`."""
    _read_ahead: bytearray = field(default_factory=bytearray)
    _killed: bool = False

    @classmethod
    async def start(
        cls,
        module: str,
        codec: Codec[Message],
        memory_bytes: int = 0,
        variables: Mapping[str, str] | None = None,
    ) -> Worker[Message]:
        """Starts `python -m module` in a session of its own, without this service's settings and secrets."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        tree = f"{os.environ.get('HEADRACE_INCARNATION') or os.getpid()}/{uuid.uuid4().hex}"
        environment |= {**(variables or {}), TREE_VARIABLE: tree}
        environment |= {PARENT_VARIABLE: str(os.getpid()), MEMORY_VARIABLE: str(memory_bytes)}
        if _secrets:
            environment[HIDDEN_VARIABLE] = os.pathsep.join(map(str, _secrets))
        # -P: a file in the current directory must not stand in for a library.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=_BUFFER_BYTES,
            start_new_session=True,
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        return cls(codec, process, process.stdout, process.stdin, tree)

    def send(self, message: Message) -> None:
        """Queues a message; a dead worker is noticed by the next `receive`."""
        self.writer.write(frame(self.codec.encode(message)))

    async def receive(self, timeout_s: float) -> Message:
        """The next message.

        Raises:
            WorkerTimeout: none came within `timeout_s`.
            WorkerGone: the worker ended or broke the protocol.
        """
        # A burst of replies costs one read and no timer each: what has come is taken first.
        if (message := self._taken()) is not None:
            return message
        for limit in (timeout_s, _GRACE_S):
            try:
                async with asyncio.timeout(limit):
                    return await self._next()
            except TimeoutError:
                continue
        raise WorkerTimeout(f"no reply within {timeout_s:g} s")

    async def wait_or_kill(self) -> int:
        """For a worker that seems to have ended: its own exit status, if it comes soon."""
        await asyncio.wait({asyncio.ensure_future(self.process.wait())}, timeout=_EXIT_TIMEOUT_S)
        return await self.kill()

    async def kill(self) -> int:
        """Ends the worker and all that it started, daemons too; returns its exit status. May be called twice."""
        if not self._killed:
            self._killed = True
            started = descendants([self.process.pid])[1:]
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for pid in started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.writer.close()
            # Those whose parents had ended before: nothing but their environment tells whose they are.
            await asyncio.to_thread(kill_tree, self.tree)
        async with asyncio.timeout(_REAP_TIMEOUT_S):
            return await self.process.wait()

    async def _next(self) -> Message:
        while (message := self._taken()) is None:
            try:
                # Cancelled by a limit, it leaves what came in the reader.
                data = await self.reader.read(_BUFFER_BYTES)
            except ConnectionError as error:
                raise WorkerGone("the worker process ended") from error
            if not data:
                raise WorkerGone("the worker process ended")
            self._read_ahead += data
        return message

    def _taken(self) -> Message | None:
        """The next message of what was read, if it is there whole."""
        ahead = self._read_ahead
        if len(ahead) < LENGTH.size:
            return None
        try:
            end = LENGTH.size + checked_size(bytes(ahead[: LENGTH.size]))
            if len(ahead) < end:
                return None
            message = self.codec.decode(bytes(ahead[LENGTH.size : end]))
        except ValueError as error:
            raise WorkerGone(f"the worker process broke the protocol: {error}") from error
        del ahead[:end]
        return message


def exit_description(status: int) -> str:
    """What an exit status means, in words."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
