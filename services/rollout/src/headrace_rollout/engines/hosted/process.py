"""The life of the engine's process, and the thread whose event loop calls it.

The process is started on the lease's devices, watched, killed when it hangs, and started again. Between two leases it
sleeps; see `release`. Knows no samples and no weights: it calls `lost` when the process is gone,
and `restored` when a new one is up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_servicekit.causes import cause_first

from headrace_rollout.engines.base import Refused, Scope
from headrace_rollout.engines.hosted.backend import Backend, Deadlines, Start, within
from headrace_rollout.engines.hosted.processes import gpus_among, used_by, used_on
from headrace_rollout.engines.hosts import BackendFailed

if TYPE_CHECKING:
    import torch


_Result = TypeVar("_Result")


WATCH_S = 0.5
STOP_S = 60.0
RESTARTS = 3
"""Deaths without a token between them, after which the engine stays down until it is placed again."""
ASLEEP_BYTES = 2 * 2**30
"""What a sleeping engine may keep of each GPU: its context and its libraries' buffers. With more it is ended."""
_log = logging.getLogger(__name__)


class EngineProcess:
    """Starts a backend when it is first needed, and again when it died."""

    def __init__(
        self,
        backend: Backend,
        deadlines: Deadlines,
        lost: Callable[[str], None],
        restored: Callable[[], Awaitable[None]],
    ) -> None:
        self.backend = backend
        self._placed: Start | None = None
        self._made_with: Start | None = None
        self._others_bytes = 0
        self._kept_bytes = 0
        """What it kept of its GPUs at its last sleep."""
        self._released: list[Scope] = []
        self._deadlines = deadlines
        self._lost = lost
        self._restored = restored
        self._starting: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._deaths = 0
        self._last_death = ""
        self._silent_since: float | None = None
        self._threads = 0
        self._up = False

    @property
    def up(self) -> bool:
        """A process runs and is of use."""
        return self._up and self.backend.alive

    @property
    def asleep(self) -> bool:
        """Some of its memory was released."""
        return bool(self._released)

    @property
    def others_bytes(self) -> int:
        """Others' memory as it last got its GPUs: not its own where the driver does not count by process."""
        return self._others_bytes

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Those that the process was started on, if there is one."""
        return self._made_with.devices if self._made_with else ()

    def heard(self, running: int) -> None:
        """A token came, or a request was added or ended: `running` are left."""
        self._silent_since = asyncio.get_running_loop().time() if running else None

    def made_progress(self) -> None:
        """Tokens were made: deaths before them no longer count towards RESTARTS."""
        self._deaths = 0

    async def ready(self) -> None:
        """Returns when the process is up; starts it where there is none. Refused ENGINE_FAILED when it cannot be."""
        if self.up and self._starting is None:
            return
        self.begin()
        starting = self._starting
        assert starting is not None
        await asyncio.wait([starting])
        if starting.cancelled():
            raise Refused("SUSPENDED", f"the lease ended before {self.backend.name} was up")
        await starting

    def begin(self) -> None:
        """Starts the process in the background, unless it is up or on its way."""
        if self._starting is None and not self.up:
            self._starting = asyncio.create_task(self._start(), name="start engine")
            self._starting.add_done_callback(self._started)

    def died(self, reason: str) -> None:
        """Kills the process, which is of no use any more, and starts another one."""
        if not self._up:
            return
        reason = getattr(self.backend, "death", "") or reason
        self._up, self._deaths, self._last_death = False, self._deaths + 1, reason
        _log.error("the engine failed", extra={"engine": self.backend.name, "reason": reason})
        self._lost(reason)
        if self._deaths <= RESTARTS and self._placed is not None:
            self.begin()

    async def place(self, start: Start) -> bool:
        """Takes the lease's devices. False when the process that runs was made for others and another one starts."""
        kept = self._made_with is not None and self._made_with.devices == start.devices
        self._placed = start
        if not kept:
            await self.stop()
            self.begin()
        elif (
            self._released
        ):  # nobody else computes there now: what is there beside its own is others' contexts
            self._others_bytes = max(0, used_on(gpus_among(start.devices)) - self._kept_bytes)
        await self.bind(start.threads)
        return kept

    async def cancel_start(self) -> None:
        """Ends a start that is under way, as its lease ends: commands that wait for it are Refused."""
        if self._starting is not None:
            self._starting.cancel()

    async def release(self) -> None:
        """Without devices from now on: the process sleeps, and ends where that leaves too much of a GPU in use.

        On a CPU it keeps host memory, and computes nothing.
        """
        self._placed = None
        gpus = gpus_among(self.devices)
        if self.up and (not gpus or self.backend.capabilities.suspend_frees_memory):
            with suppress(Refused):  # it is down then
                await self.sleep()
        if (
            not self.up
            or getattr(self.backend, "ends_between_leases", False)
            or used_by(gpus, self.backend.pids, self._others_bytes) > ASLEEP_BYTES * len(gpus)
        ):
            await self.stop()

    async def sleep(self) -> None:
        """Releases the memory of weights and cache, where a process is up."""
        if self.up and not self._released:
            await self.call("sleep", self.backend.sleep())
            self._released = [Scope.WEIGHTS, Scope.KV_CACHE]
            self._kept_bytes = used_by(gpus_among(self.devices), self.backend.pids, self._others_bytes)

    async def wake(self, wanted: Scope) -> None:
        """Takes memory for weights or cache again, where it was released."""
        if wanted in self._released:
            await self.call("wake", self.backend.wake(wanted))
            self._released.remove(wanted)

    async def call(self, name: str, call: Awaitable[_Result]) -> _Result:
        """A command of the backend. One that fails or hangs costs the process: Refused ENGINE_FAILED."""
        try:
            return await within(self._deadlines.command_s, f"{name} of {self.backend.name}", call)
        except BackendFailed as error:
            self.died(str(error))
            raise Refused("ENGINE_FAILED", f"{name} failed: {error}; the engine is started again") from error

    async def stop(self) -> None:
        """Ends the process; the next `ready` starts another."""
        self._up, self._deaths, self._silent_since = False, 0, None
        self._made_with, self._released = None, []
        for task in (self._watching, self._starting):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, Refused):
                    await task
        self._watching = self._starting = None
        await within(STOP_S, f"stop of {self.backend.name}", self.backend.stop())

    async def bind(self, threads: int) -> None:
        """Lets the engine compute on the cores that this process may use, with `threads` threads."""
        if not self.up:
            return  # its start says how many
        cores = os.sched_getaffinity(0)
        for pid in self.backend.pids:
            with suppress(OSError):  # it, or a thread of it, ended meanwhile
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), cores)
        if threads != self._threads:
            await self.call("threads", self.backend.use_threads(threads))
            self._threads = threads

    async def _start(self) -> None:
        name = self.backend.name
        start = self._placed
        if start is None:
            raise Refused("NOT_PLACED", f"{name} has no devices yet; grant a lease first")
        if self._deaths > RESTARTS:
            message = cause_first(self._last_death, f"{name} ended {self._deaths} times without a token")
            raise Refused("ENGINE_FAILED", message)
        await within(STOP_S, f"stop of {name}", self.backend.stop())
        self._made_with, self._released = start, []
        self._others_bytes = used_on(gpus_among(start.devices))
        try:
            await within(self._deadlines.start_s, f"start of {name}", self.backend.start(start))
        except BackendFailed as error:
            await within(STOP_S, f"stop of {name}", self.backend.stop())
            raise Refused("ENGINE_FAILED", f"{name} did not start: {error}") from error
        self._up, self._silent_since, self._threads = True, None, start.threads
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="watch engine")
        await self._restored()

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the engine is not up", extra={"engine": self.backend.name, "reason": str(error)})

    async def _watch(self) -> None:
        loop, limit = asyncio.get_running_loop(), self._deadlines.silence_s
        while True:
            await asyncio.sleep(WATCH_S)
            if self._up and not self.backend.alive:
                self.died(getattr(self.backend, "death", "") or "its process ended")
            elif self._up and self._silent_since is not None and loop.time() - self._silent_since > limit:
                self.died(f"no token for {limit:g} s while requests run")


class LoopThread:
    """Runs coroutines on a loop of its own until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self.closed = False

    async def call(self, act: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """The result of `act` on the loop. It goes on when the caller is cancelled: a command is whole or not begun."""
        if self.closed:
            raise Refused("NOT_OPEN", "the run was closed; call OpenRun first")
        future = asyncio.run_coroutine_threadsafe(act(), self._loop)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def close(self) -> None:
        """Ends the loop and its tasks, then the thread."""
        if self.closed:
            return
        self.closed = True
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
