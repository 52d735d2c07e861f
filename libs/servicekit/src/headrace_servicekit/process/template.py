"""A template of the services of one Python: started once, asked for each process, started again when it ended.

Importing torch and transformers takes a service most of its start: 4 to 8 seconds of a core. The template does it once;
what it forks listens within a second or two, again and again, and shares its pages.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from headrace_servicekit.lease.devices import prepare_torch
from headrace_servicekit.process.spawn import start_child
from headrace_servicekit.process.template_process import MAX_BYTES, ROOM

MODULES = ("headrace_rollout", "headrace_trainer")
"""The services that are forked: those that import torch. It takes the others longer to wait for it."""
SWITCH = "HEADRACE_TEMPLATE"
"""Set to 0, each service is started by itself."""
_GONE = -int(signal.SIGKILL)
"""The status of a process whose template ended: the kernel killed it."""


def is_forked(command: list[str]) -> bool:
    """Whether a command is a service that a template of its Python can fork."""
    return command[1:2] == ["-m"] and command[2] in MODULES and os.environ.get(SWITCH) != "0"


class Forked:
    """A process that a template started; `wait` gives its exit status, or minus the signal that ended it."""

    def __init__(self, pid: int, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self._ended = ended

    async def wait(self) -> int:
        """The status, once the process has ended."""
        return await asyncio.shield(self._ended)


class Template:
    """The template of one Python; it starts with the first process that is wanted of it, and again when it ended."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._channel: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting: list[asyncio.Future[Forked | None]] = []
        self._running: dict[int, asyncio.Future[int]] = {}
        self._lock = asyncio.Lock()

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: int
    ) -> Forked | None:
        """Starts `PYTHON -m MODULE …` as `spawn.start_child` does; None when the template ended before it could.

        Waits until the template has imported its libraries.
        """
        async with self._lock:
            if self._channel is None:
                await self._begin()
            if self._channel is None:
                return None
            request = json.dumps({"command": list(command[1:]), "environment": dict(environment)})
            try:
                socket.send_fds(self._channel, [request.encode()], [output])
            except OSError:  # it ended, or its queue is full while it imports
                return None
            started: asyncio.Future[Forked | None] = asyncio.get_running_loop().create_future()
            self._starting.append(started)
        return await started

    @property
    def pid(self) -> int:
        """The process id of the template; 0 while there is none."""
        return self._process.pid if self._process and self._channel else 0

    async def close(self) -> None:
        """Ends the template, and what it still runs with it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await self._reading

    async def _begin(self) -> None:
        # Read by torch: huge pages for large blocks, which a trainer wants; and no CUDA where one asks for GPUs.
        environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        prepare_torch(environment)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for each in (ours, theirs):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
            ours.setblocking(False)
            self._process = await start_child(
                [self._python, "-m", "headrace_servicekit.process.template_process", ROOM],
                environment=environment,
                output=2,
                input=theirs.fileno(),
            )
        self._channel = ours
        self._reading = asyncio.create_task(self._read(ours), name="template")

    async def _read(self, channel: socket.socket) -> None:
        """Hears of starts, in the order of the requests, and of ends, until the template ends."""
        loop = asyncio.get_running_loop()
        with channel, suppress(ConnectionError):
            while data := await loop.sock_recv(channel, MAX_BYTES):
                told = json.loads(data)
                if "status" in told:
                    self._running.pop(told["pid"]).set_result(told["status"])
                    continue
                ended = self._running[told["pid"]] = loop.create_future()
                started = self._starting.pop(0)
                if started.cancelled():  # nobody waits for it any more
                    os.kill(told["pid"], signal.SIGKILL)
                else:
                    started.set_result(Forked(told["pid"], ended))
        self._channel = None
        for started in self._starting:
            if not started.cancelled():
                started.set_result(None)
        for ended in self._running.values():
            ended.set_result(_GONE)
        self._starting.clear()
        self._running.clear()
