"""The public events of all runs: in files, and in memory those that are durable in the store and not yet in files.

The store keeps an event until a snapshot covers it, and a snapshot waits for `written`: so an event is always in the
store or in a file. After a crash what follows the snapshot is written again from the store, by number: without gap or
repeat.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from headrace_servicekit.folders import replace_below

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.store.run_files import Item, Line, RunFiles, salvage
from headrace_coordinator.waits import Notifier

log = logging.getLogger(__name__)
T = TypeVar("T")
Thread = Callable[..., Awaitable[Any]]
NAME = "history"
SUMMARY = "summary.json"
"""The last view of a run that has ended, beside its history."""
TAIL_LIMIT = 4096
"""Events in memory above which nothing more is appended to the store: the disk must take some first."""
LINGER_S = 0.1
RETRY_S = 1.0
PAGE, PAGE_BYTES = 256, 1 << 20
PARTIALS = ("checkpoints/lineage-*/.step-*", "checkpoints/.carried-*", ".*.partial", "*/.*.partial")
"""Checkpoints, exports, files and videos on their way, below a run's directory."""


class History:
    """Public events of runs, below `runs`/<run>/history. `thread` runs a function that reads or writes the disk.

    Not `synced`: what is written need not survive a loss of power.
    """

    def __init__(
        self, runs: Path | None = None, thread: Thread = asyncio.to_thread, *, synced: bool = True
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="history-") if runs is None else None
        self._runs = Path(self._temporary.name) if self._temporary else Path(runs or "")
        self._thread = thread
        self._synced = synced and runs is not None
        self._tails: dict[str, list[tuple[int, ev.Event, bytes]]] = defaultdict(list)
        self._floors: dict[str, int] = {}
        self._posted: dict[str, int] = {}
        self._due = asyncio.Event()
        self._writing = asyncio.Lock()
        self.news = Notifier()
        self.trouble = ""

    @property
    def backlog(self) -> int:
        """Events that wait for the disk."""
        return sum(len(tail) for tail in self._tails.values())

    # --- from the event log

    async def recover(self, runs: dict[str, list[Line]], synced: int, stored: int) -> None:
        """Makes the files match the store at a start: its log ends at `stored`, its snapshot covers up to `synced`."""
        for run, lines in runs.items():
            await self._on(run, lambda files: files.recover(synced, stored, lines), write=True)  # noqa: B023
            self._floors[run] = stored

    def posted(self, run: str, number: int) -> None:
        """Notes that an event of the run was posted; `extend` brings it once it is durable."""
        self._posted[run] = number

    def extend(self, events: Iterable[tuple[str, int, ev.Event, bytes]]) -> None:
        """Adds durable events: (run, number, event, encoded event)."""
        for run, number, event, data in events:
            self._tails[run].append((number, event, data))
        self._due.set()
        self.news.beat()

    async def run(self) -> None:
        """Writes tails to files for ever; repeats what the disk refuses, and says why in `trouble`."""
        while True:
            await self._due.wait()
            await asyncio.sleep(LINGER_S)
            self._due.clear()
            if not await self._try(self.write):
                self._due.set()
                await asyncio.sleep(RETRY_S)

    async def write(self) -> None:
        """Returns when everything so far is in the files. OSError when the disk refuses."""
        # The thread goes on when its caller is cancelled: what it has written must be removed from the tail even then.
        await asyncio.shield(self._write())

    async def _write(self) -> None:
        async with self._writing:
            for run in [run for run, tail in self._tails.items() if tail]:
                items = list(self._tails[run])
                await self._on(run, lambda files: files.append(items), write=True)  # noqa: B023
                self._floors[run] = items[-1][0]
                del self._tails[run][: len(items)]

    async def written(self) -> None:
        """`write`, repeated until the disk allows it."""
        while not await self._try(self.write):  # noqa: ASYNC110  a disk gives no sign when it takes more
            await asyncio.sleep(RETRY_S)

    async def _try(self, work: Callable[[], Awaitable[None]]) -> bool:
        try:
            await work()
        except OSError as error:
            if not self.trouble:
                log.warning("the histories of runs wait for the disk: %s", error)
            self.trouble = str(error)
            return False
        self.trouble = ""
        return True

    async def write_beside(self, run: str, name: str, data: bytes) -> None:
        """Replaces a file in the run's history directory, synced. OSError when the disk refuses."""

        def replace() -> None:
            with replace_below(self._runs, self.directory(run) / name, synced=True) as file:
                file.write(data)

        await self._thread(replace)

    async def sweep(self, run: str) -> None:
        """Removes what writers that were killed left half-written in the directory of a run that has ended."""
        await self._thread(_remove_partials, self._runs / run)

    def forget(self, run: str) -> None:
        """Removes the run from memory: nothing more will be written of it."""
        self._tails.pop(run, None)
        self._floors.pop(run, None)
        self._posted.pop(run, None)

    async def remove(self, run: str) -> None:
        """Removes a deleted run's directory, with all that is in it. OSError when the disk refuses."""
        self.forget(run)
        if (directory := self._runs / run).exists():
            await self._thread(shutil.rmtree, directory)

    # --- reading

    def directory(self, run: str) -> Path:
        """Where a run's history lies."""
        return self._runs / run / NAME

    def strangers(self, known: Collection[str]) -> tuple[list[dict[str, Any]], list[str]]:
        """Runs on the disk that are not `known`: what was archived of those that had ended, and names of the others."""
        ended: list[dict[str, Any]] = []
        others: list[str] = []
        for directory in sorted(self._runs.glob("*/history")):
            run = directory.parent.name
            if run in known:
                continue
            try:
                view = json.loads((directory / SUMMARY).read_bytes())
                state, created, evaluates = view["state"], view["created_at"], view["suite"] is not None
                whose = {name: view[name] for name in ("owner", "team", "visibility")}
                ended.append(
                    {"run": run, "state": state, "created_at": created, "evaluation": evaluates, **whose}
                )
            except (OSError, ValueError, KeyError):
                others.append(run)
        return ended, others

    def locate(self, runs: Iterable[RunState]) -> None:
        """Sets the paths of runs below the data directory, which may have been moved since they were submitted."""
        if self._temporary is not None:
            return
        for run in runs:
            before, run.directory = Path(run.directory).parent, str(self._runs / run.id)
            if (asked := run.evaluation) is not None and asked.checkpoint_directory:
                checkpoint = Path(asked.checkpoint_directory)
                if checkpoint.is_relative_to(before):
                    asked.checkpoint_directory = str(self._runs / checkpoint.relative_to(before))

    async def page(self, run: str, after: int) -> list[Item]:
        """Durable events with numbers above `after`, in order: some of them, or none when there are none."""
        while (floor := self._floors.get(run)) is None or after < floor:
            found = await self._on(run, lambda files: files.after(after, PAGE, PAGE_BYTES))
            if found:
                return found
            if floor == self._floors.get(run):
                break  # else the tail was written meanwhile
        return [(number, event) for number, event, _ in self._tails.get(run, ()) if number > after]

    def complete(self, run: str, sent: int) -> bool:
        """Whether no event with a number above `sent` was posted."""
        return self._posted.get(run, 0) <= sent

    async def read(self, run: str, look: Callable[[RunFiles], T]) -> T:
        """The result of `look` on the run's files, after the tail was written to them (unless the disk refuses)."""
        if self._tails.get(run):
            await self._try(self.write)
        return await self._on(run, look)

    async def kept(self, run: str, frontier_step: int) -> ev.Kept:
        """The totals of a run's live steps below `frontier_step`: what a rewind to that step keeps."""

        def look(files: RunFiles) -> ev.Kept:
            tally, last = files.kept(frontier_step)
            view = last.view if isinstance(last, ev.StepCommitted) else None
            return ev.Kept(counts=tally.counts, last_step=view)

        return await self.read(run, look)

    async def _on(self, run: str, work: Callable[[RunFiles], T], *, write: bool = False) -> T:
        """The result of `work` on the run's files, in a thread; what can be read of damaged ones takes their place."""
        directory = self.directory(run)

        def attempt() -> T:
            with RunFiles.opened(directory, write=write, synced=self._synced) as files:
                return work(files)

        for last in (False, True):
            try:
                found: T = await self._thread(attempt)
                return found
            except sqlite3.DatabaseError as error:
                if last:
                    raise
                log.warning("the history of run %s is damaged: %s; it goes on with what is good", run, error)
            async with nullcontext() if write else self._writing:  # Who writes has the lock.
                await self._thread(salvage, directory)
        raise AssertionError


def _remove_partials(directory: Path) -> None:
    for pattern in PARTIALS:
        for path in directory.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
