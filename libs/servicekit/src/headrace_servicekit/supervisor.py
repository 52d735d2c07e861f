"""Runs instances as child processes: starts, restarts with backoff, kills on command, stops without orphans.

Reports their ends to the coordinator through a SupervisorLink. Knows no service's flags.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace_servicekit.child import Child, ChildSettings, ProcessEnd, ProcessInfo, Spawn
from headrace_servicekit.logs import get_logger
from headrace_servicekit.supervisor_link import SupervisorLink

__all__ = ["ProcessEnd", "ProcessInfo", "Spawn", "Supervisor"]

STOP_GRACE_S = 15.0
_logger = get_logger(__name__)


def _numbered(kind: str, index: int) -> str:
    return f"{kind}-{index}"


class Supervisor:
    """Keeps a wanted number of processes of each kind running.

    `spawn(kind, index, incarnation)` gives the command of one process, which also finds its incarnation in
    HEADRACE_INCARNATION and its name, by default KIND-INDEX, in HEADRACE_NAME. Output goes to
    `log_dir`/NAME.log. With an empty `coordinator_address` nothing is reported; the coordinator may change
    the number of `scalable_kinds` only. The kind "coordinator" is supervised and not reported. `on_end`
    hears of every end.
    """

    def __init__(
        self,
        host: str,
        coordinator_address: str,
        token: str | None,
        spawn: Spawn,
        log_dir: Path,
        *,
        scalable_kinds: Sequence[str] = (),
        name: Callable[[str, int], str] = _numbered,
        echo: bool = False,
        on_end: Callable[[ProcessEnd], None] = lambda end: None,
    ) -> None:
        self._spawn = spawn
        self._log_dir = log_dir
        self._name = name
        self._echo = echo
        self._on_end = on_end
        self._children: dict[str, list[Child]] = {}
        self._leaving: set[asyncio.Task[int]] = set()
        self._started = False
        self._scalable_kinds = tuple(scalable_kinds)
        self._link = SupervisorLink(host, coordinator_address, token, self)

    @property
    def scalable_kinds(self) -> tuple[str, ...]:
        """Kinds whose number the coordinator may change."""
        return self._scalable_kinds

    def set_count(self, kind: str, n: int) -> None:
        """Wants `n` processes of a kind: starts the missing ones, stops the highest indices beyond it."""
        if n < 0:
            raise ValueError(f"{kind}: the number of processes cannot be {n}")
        children = self._children.setdefault(kind, [])
        while len(children) > n:
            self._retire(children.pop())
        while len(children) < n:
            children.append(Child(self._settings(kind, len(children))))
        if self._started:
            for child in children:
                child.start()
            self._link.report_processes()

    def count(self, kind: str) -> int:
        """Wanted number of processes of a kind."""
        return len(self._children.get(kind, []))

    def processes(self) -> list[ProcessInfo]:
        """What runs or waits to be started."""
        return [child.info() for children in self._children.values() for child in children]

    def kill(self, instance: str, incarnation: str, reason: str = "") -> bool:
        """SIGKILLs a process with its group; it is restarted. False when that incarnation is not running."""
        for children in self._children.values():
            for child in children:
                if child.info().instance == instance and child.kill(incarnation):
                    _logger.warning("killed", extra={"supervised": instance, "reason": reason})
                    return True
        return False

    async def start(self) -> None:
        """Starts the wanted processes and reports to the coordinator in the background."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._started = True
        for children in self._children.values():
            for child in children:
                child.start()
        self._link.start()

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """SIGTERM to all, SIGKILL to what is left after the grace; a coordinator goes last.

        Returns the first exit status that is not 0, or 0.
        """
        self._started = False
        last = self._children.pop("coordinator", [])
        first = [child for children in self._children.values() for child in children]
        self._children.clear()
        statuses = await asyncio.gather(*(child.stop(grace_s) for child in first), *self._leaving)
        await self._link.stop()
        statuses += await asyncio.gather(*(child.stop(grace_s) for child in last))
        return next((status for status in statuses if status), 0)

    def _settings(self, kind: str, index: int) -> ChildSettings:
        return ChildSettings(
            kind=kind,
            index=index,
            name=self._name(kind, index),
            spawn=self._spawn,
            log_dir=self._log_dir,
            echo=self._echo,
            on_start=self._link.report_processes,
            on_end=self._ended,
        )

    def _ended(self, end: ProcessEnd) -> None:
        self._link.report_exit(end)
        self._on_end(end)

    def _retire(self, child: Child) -> None:
        task = asyncio.ensure_future(child.stop(STOP_GRACE_S))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
