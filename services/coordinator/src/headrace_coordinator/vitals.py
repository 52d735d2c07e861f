"""The process's lasting tasks in one group, and what /healthz says: store, loop lag, tasks. Knows no run."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from importlib.metadata import version

from headrace_schema.resources.fleet import HealthView

from headrace_coordinator.store.event_log import EventLog

SAMPLE_S = 0.5
SAMPLES = 20
LAG_LIMIT_MS = 5000.0
"""A loop that is later than one heartbeat no longer keeps leases in time."""


class TaskEnded(Exception):
    """A task that must last for the life of the process has ended; the message names it and says why."""


class Vitals:
    """Runs the lasting tasks and measures the event loop."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._lags_ms: deque[float] = deque([0.0], maxlen=SAMPLES)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.grpc_port = 0

    async def run(
        self, lasting: Mapping[str, Callable[[], Awaitable[None]]], serve: Callable[[], Awaitable[None]]
    ) -> None:
        """Runs `serve` while the `lasting` tasks live, then ends them.

        Raises:
            TaskEnded: one of them ended first; `serve` is cancelled.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for name, work in {**lasting, "loop lag": self._measure}.items():
                    self._tasks[name] = group.create_task(_lasting(name, work), name=name)
                await serve()
                for task in self._tasks.values():
                    task.cancel()
        except BaseExceptionGroup as group:  # the task group wraps everything; callers know the error itself
            ended = [error for error in group.exceptions if isinstance(error, TaskEnded)]
            raise (ended or group.exceptions)[0] from None

    async def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            self._lags_ms.append(max(0.0, loop.time() - due) * 1000)

    def view(self) -> HealthView:
        """The health now; the loop's lag is the worst of the last ten seconds."""
        lag, trouble = max(self._lags_ms), self._event_log.store_trouble
        tasks = {name: not task.done() for name, task in self._tasks.items()}
        problems = [f"the store (Redis) takes no writes: {trouble}"] if trouble else []
        problems += [f"the {name} task has ended" for name, alive in tasks.items() if not alive]
        if lag > LAG_LIMIT_MS:
            problems.append(
                f"the event loop was {lag:.0f} ms late: the machine is overloaded, or it stood still"
            )
        return HealthView(
            status="unhealthy" if problems else "ok",
            reason="; ".join(problems) or self._event_log.loss,
            store_writable=not trouble,
            loop_lag_ms=round(lag, 1),
            tasks=tasks,
            coordinator_epoch=self._event_log.state.epoch,
            version=version("headrace-coordinator"),
            time=self._event_log.now(),
            grpc_port=self.grpc_port,
        )


async def _lasting(name: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception as error:  # whatever ends a lasting task ends the process, under the task's name
        raise TaskEnded(f"the {name} task ended: {type(error).__name__}: {error}") from error
    raise TaskEnded(f"the {name} task ended without an error, which it never should")
