"""Runs instances as child processes: starts, restarts with backoff, kills on command, stops without orphans.

Reports their ends to the coordinator through a SupervisorLink. Knows no service's flags.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace_servicekit.folders import own_folder
from headrace_servicekit.instance_config import KINDS, default_drain_grace_s
from headrace_servicekit.logs import get_logger
from headrace_servicekit.memory.capacity import Capacity
from headrace_servicekit.process.child import (
    Child,
    ChildSettings,
    Process,
    ProcessEnd,
    ProcessInfo,
    Spawn,
    StartGate,
)
from headrace_servicekit.process.spawn import start_child
from headrace_servicekit.process.supervisor_link import SupervisorLink
from headrace_servicekit.process.template import Template, is_forked

__all__ = ["ProcessEnd", "ProcessInfo", "Spawn", "Supervisor"]

STOP_GRACE_S = 15.0
"""From the end of an instance's own grace, in which the coordinator closes its runs, to SIGKILL."""
SAMPLE_S = 10.0
_logger = get_logger(__name__)


def stop_grace_s(kind: str) -> float:
    """Seconds from SIGTERM to SIGKILL for a process of a kind. HEADRACE_DRAIN_GRACE_S overrides its own part."""
    if kind not in KINDS:
        return STOP_GRACE_S
    own = os.environ.get("HEADRACE_DRAIN_GRACE_S", "")
    try:
        return float(own) + STOP_GRACE_S
    except ValueError:  # The instance itself refuses to start with it, and says why.
        return default_drain_grace_s(kind) + STOP_GRACE_S


def _numbered(kind: str, index: int) -> str:
    return f"{kind}-{index}"


class Supervisor:
    """Keeps a wanted number of processes of each kind running.

    `spawn(kind, index, incarnation)` gives the command of one process, which also finds its incarnation in
    HEADRACE_INCARNATION, its name, by default KIND-INDEX, in HEADRACE_NAME, and its index in HEADRACE_INDEX. Output
    goes to `log_dir`/NAME.log. With an empty `coordinator_address` nothing is reported; the coordinator may change
    the number of `scalable_kinds` only, up to what `capacity` allows. Kinds that the contract does not have
    are supervised, but not reported. At most `starts_at_once` processes start at a time. `on_end` hears of
    every end.
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
        capacity: Capacity | None = None,
        starts_at_once: int = sys.maxsize,
    ) -> None:
        self._spawn = spawn
        self._log_dir = log_dir
        self._name = name
        self._echo = echo
        self._on_end = on_end
        self._children: dict[str, list[Child]] = {}
        self._leaving: dict[Child, asyncio.Task[int]] = {}
        self._started = False
        self._scalable_kinds = tuple(scalable_kinds)
        self._capacity = capacity or Capacity()
        self._gate = StartGate(starts_at_once)
        self._templates: dict[str, Template] = {}
        self._sampling: asyncio.Task[None] | None = None
        self._link = SupervisorLink(host, coordinator_address, token, self)

    @property
    def away(self) -> str:
        """Why the line to the coordinator is down; "" while it is up."""
        return self._link.away

    @property
    def refusal(self) -> str:
        """The coordinator's reason for refusing this supervisor; "" where it does not."""
        return self._link.refusal

    @property
    def scalable_kinds(self) -> tuple[str, ...]:
        """Kinds whose number the coordinator may change."""
        return self._scalable_kinds

    async def scale(self, kind: str, n: int) -> str:
        """Wants `n` processes of a kind if the host can hold them, else returns why not; waits for none."""
        if not self._started:
            return f"scale {kind}={n}: the fleet is stopping"
        if n > self.count(kind):
            refusal = await asyncio.to_thread(self._capacity.refusal, kind, n, self._wanted())
            if refusal:
                return refusal
        self.set_count(kind, n)
        return ""

    def set_count(self, kind: str, n: int) -> None:
        """Wants `n` processes of a kind: starts the missing ones, stops the highest indices beyond it."""
        if n < 0:
            raise ValueError(f"{kind}: the number of processes cannot be {n}")
        children = self._children.setdefault(kind, [])
        while len(children) > n:
            self._retire(children.pop(), stop_grace_s(kind))
        while len(children) < n:
            children.append(Child(self._settings(kind, len(children))))
        if self._started:
            self._start(children)
            self._link.report_processes()

    def count(self, kind: str) -> int:
        """Wanted number of processes of a kind."""
        return len(self._children.get(kind, []))

    def processes(self) -> list[ProcessInfo]:
        """What runs or waits to be started; last what is being stopped and has not ended yet."""
        wanted = [child.info() for children in self._children.values() for child in children]
        return wanted + [info for child in self._leaving if (info := child.info()).pid]

    def templates(self) -> list[int]:
        """Process ids of the templates that fork services: these work while services wait to be forked."""
        return [template.pid for template in self._templates.values() if template.pid]

    def kill(self, instance: str, incarnation: str, reason: str = "") -> bool:
        """SIGKILLs a process with its group; it is restarted. False when that incarnation is not running."""
        wanted = [child for children in self._children.values() for child in children]
        for child in (*wanted, *self._leaving):
            if child.info().instance == instance and child.kill(incarnation):
                _logger.warning("killed", extra={"supervised": instance, "reason": reason})
                return True
        return False

    async def start(self) -> None:
        """Starts the wanted processes and reports to the coordinator in the background.

        Raises OSError where there is no folder for their logs that is this user's.
        """
        own_folder(self._log_dir, "set --log-dir")
        self._started = True
        for children in self._children.values():
            self._start(children)
        if self._scalable_kinds:
            self._sampling = asyncio.create_task(self._sample(), name="memory of the processes")
        self._link.start()

    async def stop_kind(self, kind: str, grace_s: float) -> None:
        """Ends the processes of a kind; `scale` is refused from now on. SIGTERM, after the grace SIGKILL."""
        self._started = False
        for child in self._children.pop(kind, []):
            self._retire(child, grace_s)
        await asyncio.gather(*self._leaving.values())

    async def stop(self, grace_s: float | None = None) -> int:
        """SIGTERM to all, SIGKILL to what is left after the grace; a coordinator goes last.

        Without a grace each kind has its own, see `stop_grace_s`. Returns the first exit status that is not
        0, or 0.
        """
        self._started = False
        last = self._children.pop("coordinator", [])
        for children in self._children.values():
            for child in children:
                self._retire(child, grace_s)
        self._children.clear()
        statuses = await asyncio.gather(*self._leaving.values())
        if self._sampling:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
        await self._link.stop()
        for child in last:
            self._retire(child, grace_s)
        statuses += await asyncio.gather(*self._leaving.values())
        await asyncio.gather(*(template.close() for template in self._templates.values()))
        return next((status for status in statuses if status), 0)

    def hurry(self) -> None:
        """SIGTERM again to what is being stopped: an instance then waits for no coordinator."""
        for child in self._leaving:
            child.ask_to_end()

    def _settings(self, kind: str, index: int) -> ChildSettings:
        return ChildSettings(
            kind=kind,
            index=index,
            name=self._name(kind, index),
            spawn=self._spawn,
            launch=self._launch,
            log_dir=self._log_dir,
            echo=self._echo,
            gate=self._gate,
            on_start=self._link.report_processes,
            on_end=self._ended,
        )

    async def _launch(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> Process:
        """Forks a service that imports much from a template of its Python, and starts any other command."""
        if is_forked([*command]):
            template = self._templates.setdefault(command[0], Template(command[0]))
            if process := await template.start(command, environment, output):
                return process
        return await start_child(command, environment=environment, output=output)

    def _start(self, children: list[Child]) -> None:
        former = {child.info().instance: task for child, task in self._leaving.items()}
        for child in children:
            child.start(after=former.get(child.info().instance))

    def _ended(self, end: ProcessEnd) -> None:
        self._link.report_exit(end)
        self._on_end(end)

    def _retire(self, child: Child, grace_s: float | None = None) -> None:
        """Stops a process in the background; it stays in the table until it has ended."""
        grace_s = stop_grace_s(child.info().kind) if grace_s is None else grace_s
        task = self._leaving[child] = asyncio.ensure_future(child.stop(grace_s))
        task.add_done_callback(lambda _: self._leaving.pop(child, None))

    def _wanted(self) -> list[tuple[str, int]]:
        infos = [child.info() for children in self._children.values() for child in children]
        return [(info.kind, info.pid) for info in infos]

    async def _sample(self) -> None:
        """Notes how large each kind gets while it works, until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            await asyncio.to_thread(self._capacity.sample, self._wanted())
