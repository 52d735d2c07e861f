"""Starts a run's trackers as processes, ends them, and reports one that fails. Knows no tracker and no metric."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from headrace_schema.sections.tracking import TrackingSection
from headrace_servicekit.process.spawn import signal_group, start_child

log = logging.getLogger(__name__)
END_S = 120.0
"""Seconds that a tracker may go on sending after its run has ended, paused or yielded."""
STOP_S = 5.0
"""The same when the coordinator stops: a later process sends the rest."""
Note = Callable[[str], None]


class Trackers:
    """The tracker processes of all runs; at most one of a run and a name at a time."""

    def __init__(self, end_s: float = END_S) -> None:
        self._end_s = end_s
        self._tasks: dict[tuple[Path, str], asyncio.Task[None]] = {}
        self._ends: dict[Path, list[asyncio.Future[str]]] = {}

    def begin(self, tracking: TrackingSection, directory: Path, note: Note) -> None:
        """Starts a run's trackers; returns at once. Calls `note` with a sentence about one that fails."""
        for section in tracking.trackers:
            key = directory, section.name
            end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._ends.setdefault(directory, []).append(end)
            work = self._follow(self._tasks.get(key), section.name, directory, end, note)
            self._tasks[key] = task = asyncio.create_task(work, name=f"tracker {section.name}")
            task.add_done_callback(partial(self._forget, key))

    def end(self, directory: Path, state: str) -> None:
        """Tells a run's trackers to send what is left and to end; returns at once. `state`: as for `Tracker.finish`."""
        for end in self._ends.pop(directory, []):
            if not end.done():
                end.set_result(state)

    async def stop(self) -> None:
        """Ends all of them, within STOP_S."""
        self._end_s = min(self._end_s, STOP_S)
        for directory in list(self._ends):
            self.end(directory, "")
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=STOP_S)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _forget(self, key: tuple[Path, str], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _follow(
        self,
        before: asyncio.Task[None] | None,
        name: str,
        directory: Path,
        end: asyncio.Future[str],
        note: Note,
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            failure = await self._run(name, directory, end)
        except OSError as error:
            failure = f"cannot be started: {error}"
        if failure:
            note(f"the tracker {name} {failure}; the run goes on without it")

    async def _run(self, name: str, directory: Path, end: asyncio.Future[str]) -> str:
        """Runs the process until it ends; returns how it failed, or an empty text."""
        output = directory / "trackers" / f"{name}.log"
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "headrace_coordinator.trackers", name, str(directory)]
        with output.open("ab") as file:
            process = await start_child(command, environment=os.environ, output=file.fileno(), input=PIPE)
        ended = asyncio.ensure_future(process.wait())
        try:
            waits: list[asyncio.Future[Any]] = [ended, end]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                _send_state(process, end.result())
                await asyncio.wait([ended], timeout=self._end_s)
            if not ended.done():
                return f"was ended: it had not sent everything {self._end_s:g} s after the run"
            if ended.result() != 0:
                return f"failed: {_last_line(output)} (all of it: {output})"
            return ""
        finally:
            if not ended.done():
                signal_group(process.pid, signal.SIGKILL)
                await ended


def _send_state(process: Process, state: str) -> None:
    """Writes the final state and closes the pipe; a process that has just ended does not read it."""
    if process.stdin is not None:
        process.stdin.write(state.encode())
        process.stdin.close()


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace")[-4096:].splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it wrote nothing")
