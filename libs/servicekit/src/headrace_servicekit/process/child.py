"""One supervised process: a command that is started again whenever it ends, its log, and its last lines; and a bound
on how many start at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import psutil

from headrace_servicekit.folders import open_below
from headrace_servicekit.logs import get_logger
from headrace_servicekit.process.spawn import kill_tree, signal_group

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0
STARTING_GRACE_S = 2.0
"""From SIGTERM to SIGKILL for a process that is still starting: it has nothing to save."""
MAX_LOG_BYTES = 64 * 1024 * 1024
_LAST_LINES = 20
_TAIL_BYTES = 16 * 1024
_DRAIN_S = 2.0
_logger = get_logger(__name__)

Spawn = Callable[[str, int, str], Sequence[str]]


class Process(Protocol):
    """A process that runs; `wait` gives its exit status, or minus the signal that ended it."""

    @property
    def pid(self) -> int: ...
    async def wait(self) -> int: ...


Launch = Callable[[Sequence[str], Mapping[str, str], int], Awaitable[Process]]
"""Starts a command with an environment; its outputs go to a descriptor. It dies with this process."""


@dataclass(frozen=True)
class ProcessInfo:
    """One supervised process. `pid` is 0 while it waits to be started; `restarts` counts its ends."""

    kind: str
    index: int
    instance: str
    incarnation: str
    pid: int
    restarts: int
    log_file: Path


@dataclass(frozen=True)
class ProcessEnd:
    """The end of one incarnation: exit status or minus the signal, and its last lines."""

    kind: str
    instance: str
    incarnation: str
    status: int
    last_words: str


@dataclass(frozen=True)
class ChildSettings:
    """What a place needs to run its process; `echo` also copies the output to our standard error."""

    kind: str
    index: int
    name: str
    spawn: Spawn
    launch: Launch
    log_dir: Path
    echo: bool
    gate: StartGate
    on_start: Callable[[], None]
    on_end: Callable[[ProcessEnd], None]


def _certificate_of(kind: str) -> dict[str, str]:
    """Where the certificate of a kind is, if this process has its own in a folder beside."""
    own = os.environ.get("HEADRACE_TLS_DIR")
    folder = Path(own).with_name(kind) if own else None
    return {"HEADRACE_TLS_DIR": str(folder)} if folder and folder.is_dir() else {}


class Child:
    """A place for one process; `start` keeps it running until `stop`."""

    def __init__(self, settings: ChildSettings) -> None:
        self._settings = settings
        self._log_file = settings.log_dir / f"{settings.name}.log"
        self._incarnation = ""
        self._pid = 0
        self._restarts = 0
        self._last_status = 0
        self._tail = b""
        self._start: Start | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def info(self) -> ProcessInfo:
        """The process as it is now."""
        s = self._settings
        return ProcessInfo(
            s.kind, s.index, s.name, self._incarnation, self._pid, self._restarts, self._log_file
        )

    def start(self, after: asyncio.Task[int] | None = None) -> None:
        """Starts the process and keeps it running; repeated calls do nothing.

        `after` is the end of a former process of the same name, which is waited for.
        """
        if self._task is None:
            self._task = asyncio.create_task(
                self._keep_running(after), name=f"supervise {self._settings.name}"
            )

    def kill(self, incarnation: str) -> bool:
        """SIGKILLs the process and its group if it is that incarnation; it is restarted."""
        if not self._pid or incarnation != self._incarnation:
            return False
        signal_group(self._pid, signal.SIGKILL)
        return True

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, after the grace SIGKILL to its group; returns the last exit status.

        A process that is still starting gets at most `STARTING_GRACE_S`.
        """
        self._stopping.set()
        if self._task is None:
            return 0
        if self._start and not self._start.over:
            grace_s = min(grace_s, STARTING_GRACE_S)
        self.ask_to_end()
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        if not done:
            late = {"supervised": self._settings.name, "grace_s": grace_s}
            _logger.warning("did not stop in time, killing", extra=late)
            if self._pid:
                signal_group(self._pid, signal.SIGKILL)
            else:
                self._task.cancel()
            await asyncio.wait({self._task})
        return self._last_status

    def ask_to_end(self) -> None:
        """SIGTERM to the process itself: what it started is its own to end."""
        try:
            if self._pid:
                os.kill(self._pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it ended by itself; its end is being noticed

    async def _keep_running(self, after: asyncio.Task[int] | None) -> None:
        if after:
            await asyncio.wait({after})
        backoff = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            self._start = await self._settings.gate.enter(self._settings.name, self._stopping)
            if self._start is None:
                return
            began = time.monotonic()
            try:
                await self._run_once(self._start)
            finally:
                self._start.end()
            if time.monotonic() - began >= STABLE_S:
                backoff = FIRST_BACKOFF_S
            try:
                async with asyncio.timeout(backoff):
                    await self._stopping.wait()
            except TimeoutError:
                backoff = min(backoff * 2, MAX_BACKOFF_S)
                self._restarts += 1

    async def _run_once(self, start: Start) -> None:
        settings = self._settings
        self._incarnation = uuid.uuid4().hex
        command = settings.spawn(settings.kind, settings.index, self._incarnation)
        names = {
            "HEADRACE_INCARNATION": self._incarnation,
            "HEADRACE_NAME": settings.name,
            "HEADRACE_INDEX": str(settings.index),
            **_certificate_of(settings.kind),
        }
        readable, writable = os.pipe()
        try:
            process = await settings.launch(command, {**os.environ, **names}, writable)
        except BaseException:
            os.close(readable)
            raise
        finally:
            os.close(writable)
        self._pid = process.pid
        start.watch(process.pid)
        copying = asyncio.create_task(self._copy_output(readable))
        settings.on_start()
        if self._stopping.is_set():
            self.ask_to_end()
        status = await process.wait()
        start.end()
        signal_group(process.pid, signal.SIGKILL)  # whatever it started and left behind
        await asyncio.to_thread(kill_tree, f"{self._incarnation}/")  # and what its workers did
        self._pid, self._last_status = 0, status
        await asyncio.wait({copying}, timeout=_DRAIN_S)
        copying.cancel()
        last_words = "\n".join(self._tail.decode(errors="replace").splitlines()[-_LAST_LINES:])
        level = logging.INFO if self._stopping.is_set() else logging.ERROR
        _logger.log(level, "process ended", extra={"supervised": settings.name, "status": status})
        settings.on_end(ProcessEnd(settings.kind, settings.name, self._incarnation, status, last_words))

    async def _copy_output(self, readable: int) -> None:
        """Copies the outputs to the log file, a full one being set aside once, and keeps their end."""
        self._tail = b""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(readable, "rb")
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while data := await reader.read(64 * 1024):
                self._tail = (self._tail + data)[-_TAIL_BYTES:]
                with self._open_log() as log:
                    log.write(data)
                if self._settings.echo:
                    sys.stderr.buffer.write(data)
                    sys.stderr.buffer.flush()
        finally:
            transport.close()

    def _open_log(self) -> BinaryIO:
        if self._log_file.exists() and self._log_file.stat().st_size > MAX_LOG_BYTES:
            self._log_file.replace(self._log_file.with_suffix(".log.1"))
        folder = self._log_file.parent
        return os.fdopen(open_below(folder, self._log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


START_S = 60.0
"""After so long a process that does not listen no longer keeps others from starting."""
_POLL_S = 0.25


class Start:
    """One process on its way up; it holds a place until `end`."""

    def __init__(self, places: asyncio.Semaphore, name: str) -> None:
        self.over = False
        self._places = places
        self._name = name
        self._watch: asyncio.Task[None] | None = None

    def watch(self, pid: int) -> None:
        """Ends the start once the process listens."""
        self._watch = asyncio.create_task(self._until_listening(pid), name=f"start of {self._name}")

    def end(self) -> None:
        """Gives the place to the next process; repeated calls do nothing."""
        if self._watch is not None:
            self._watch.cancel()
        if not self.over:
            self.over = True
            self._places.release()

    async def _until_listening(self, pid: int) -> None:
        deadline = asyncio.get_running_loop().time() + START_S
        while not _listens(pid):
            if asyncio.get_running_loop().time() > deadline:
                waited = {"supervised": self._name, "waited_s": START_S}
                _logger.warning("does not listen yet; the next process starts", extra=waited)
                break
            await asyncio.sleep(_POLL_S)
        self._watch = None
        self.end()


class StartGate:
    """`places` processes may start at once."""

    def __init__(self, places: int) -> None:
        self._places = asyncio.Semaphore(places)

    async def enter(self, name: str, stopping: asyncio.Event) -> Start | None:
        """Waits for a place, in the order of the calls; None when `stopping` is set first."""
        place = asyncio.ensure_future(self._places.acquire())
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait({place, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            place.cancel()
        if not stopping.is_set():
            return Start(self._places, name)
        if not place.cancelled() and place.done():
            self._places.release()
        return None


def _listens(pid: int) -> bool:
    """Whether a process listens: instances do on TCP before they register, the store on a named socket."""
    try:
        connections = psutil.Process(pid).net_connections("all")
    except psutil.Error:
        return False
    return any(
        connection.status == psutil.CONN_LISTEN or (connection.family == socket.AF_UNIX and connection.laddr)
        for connection in connections
    )
