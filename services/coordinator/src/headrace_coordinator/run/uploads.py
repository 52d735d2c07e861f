"""Copies what a run keeps to its store, beside the steps; fetches a checkpoint back where the disk has none.

One upload at a time. Decides what waits, what is skipped and when it is tried again; the process of the store does it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headrace_servicekit.stores.problems import StoreProblem
from headrace_servicekit.stores.process import StoreProcess

from headrace_coordinator.domain import events as ev

if TYPE_CHECKING:
    from headrace_coordinator.run.context import RunContext

log = logging.getLogger(__name__)
FIRST_AGAIN_S, LAST_AGAIN_S = 2.0, 120.0
"""Waits before an upload that failed is tried again."""
FOLDERS = {"export": "export", "recordings": "recordings", "videos": "videos"}
"""What `store.keep` names → the folder below the run's directory."""


async def fetch_origin(url: str, runs: Path, wanted: Callable[[str, int], bool]) -> tuple[str, str]:
    """Fetches the newest checkpoint of another run, of those `wanted` by name and step, from URL/RUN.

    Where it is, as a run's directory below `runs`; and the id of that run. Raises StoreProblem.
    """
    process = StoreProcess(url)
    try:
        live = await process.ask("live")
        named = [each for each in live if wanted(each["name"], each["step"])]
        if not named:
            raise StoreProblem(f"{url} has no such checkpoint", "name one that is there")
        name = named[0]["run"]
        place = runs / f".origin-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
        names = [each["name"] for each in named]
        fetched = await process.ask("fetch", root=str(place / "checkpoints"), names=names)
        if not fetched["found"]:
            raise StoreProblem("; ".join(fetched["damaged"]), "name an older checkpoint")
        return str(place), name
    finally:
        await process.stop()


@dataclass(frozen=True)
class _Waiting:
    name: str
    number: int
    step: int


class Uploads:
    """Of one run while it holds a grant; does nothing for a run without `store`."""

    def __init__(self, context: RunContext) -> None:
        section = context.spec.store
        self._context, self._section = context, section
        self._process = StoreProcess(f"{section.url}/{context.run_id}" if section else "")
        self._queue: deque[_Waiting] = deque()
        self._current: _Waiting | None = None
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Uploads begin, with the newest checkpoint where the store lacks it."""
        if self._section is not None:
            state = self._context.state
            if state.checkpoints and state.checkpoints[-1][0] != state.uploads.name:
                self.saved(*state.checkpoints[-1], state.uploads.saved)
            self._task = asyncio.create_task(self._work(), name=f"uploads of {self._context.run_id}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._process.stop()

    @property
    def names(self) -> list[str]:
        """Checkpoints that are uploaded now or wait for it: they must stay on disk."""
        return [each.name for each in (self._current, *self._queue) if each is not None]

    def saved(self, name: str, number: int, step: int) -> None:
        """A checkpoint is durable on disk: it waits for its upload. The oldest that waits gives way to it."""
        if self._section is None or "checkpoints" not in self._section.keep:
            return
        self._queue.append(_Waiting(name, number, step))
        while len(self._queue) > self._section.waiting:
            left = self._queue.popleft()
            reason = (
                f"{self._section.waiting} newer checkpoints wait for their upload already (store.waiting): uploads are "
                "slower than checkpoints"
            )
            self._post(ev.UploadSkipped, name=left.name, step=left.step, reason=reason)
        self._idle.clear()
        self._news.set()

    async def finish(self) -> None:
        """Waits until the store has everything, for store.at_end_s at most; tells what it lacks then."""
        if self._section is None or self._task is None:
            return
        try:
            async with asyncio.timeout(self._section.at_end_s):
                self._idle.clear()
                self._news.set()
                idle = asyncio.ensure_future(self._idle.wait())
                with self._context.fleet.waits.named(self._context.run_id, "its store to have what it keeps"):
                    await asyncio.wait({idle, self._task}, return_when=asyncio.FIRST_COMPLETED)
                idle.cancel()
        except TimeoutError:
            left = ", ".join(self.names) or "files of its directory"
            why = f": {problem}" if (problem := self._context.state.uploads.problem) else ""
            self._context.note(
                f"store.at_end_s: {self._section.url} does not have {left} after {self._section.at_end_s:g} s{why}; "
                f"they are in {self._context.state.directory}"
            )

    async def fetch_newest(self) -> str:
        """Writes the newest whole checkpoint that is not abandoned into the run's directory; its name, or ""."""
        if self._section is None:
            return ""
        abandoned = self._context.state.lineage.abandoned
        try:
            live = await self._process.ask("live")
            names = [each["name"] for each in live if not abandoned(each["number"])]
            fetched = await self._process.ask("fetch", root=str(self._root), names=names)
        except StoreProblem as problem:
            self._context.note(f"store.url: no checkpoint can be fetched: {problem}")
            return ""
        for damaged in fetched["damaged"]:
            self._context.note(f"store.url: {damaged}")
        return fetched["found"]["name"] if fetched["found"] else ""

    @property
    def _root(self) -> Path:
        return Path(self._context.state.directory) / "checkpoints"

    async def _work(self) -> None:
        again, described = FIRST_AGAIN_S, False
        while True:
            if not self._queue and not self._news.is_set():
                self._idle.set()
                await self._news.wait()
            self._news.clear()
            try:
                if not described:
                    said = {"run": self._context.run_id, "spec": self._context.state.spec}
                    await self._process.ask("describe", said=said)
                    described = True
                while self._queue:
                    self._current = self._queue.popleft()
                    await self._upload(self._current)
                    self._current = None
                await self._copy_folders()
                again = FIRST_AGAIN_S
            except StoreProblem as problem:
                self._failed(problem)
                await asyncio.sleep(again)
                again = min(2 * again, LAST_AGAIN_S)
                self._news.set()

    async def _upload(self, wanted: _Waiting) -> None:
        """Uploads a checkpoint. Raises StoreProblem, once it waits again where no newer one does."""
        context, started = self._context, self._context.event_log.monotonic()
        retained = [*self.names, *context.recording.bases()]
        facts = {"run": context.run_id, "step": wanted.step, "number": wanted.number}
        if not (self._root / wanted.name).is_dir():
            self._post(ev.UploadSkipped, name=wanted.name, step=wanted.step, reason="it is no longer on disk")
            return
        try:
            uploading = f"checkpoint {wanted.name} is uploaded to {self._process.url}"
            with context.fleet.waits.stage(
                context.run_id, uploading, told=False, progress=self._process.read
            ):
                done = await self._process.ask(
                    "upload",
                    root=str(self._root),
                    name=wanted.name,
                    facts=facts,
                    keep=context.spec.checkpoint.keep,
                    retained=retained,
                )
        except StoreProblem as problem:
            self._current = None
            if not self._queue:
                self._queue.appendleft(wanted)
            else:
                self._post(ev.UploadSkipped, name=wanted.name, step=wanted.step, reason=str(problem))
            raise
        self._post(
            ev.CheckpointUploaded,
            name=wanted.name,
            number=wanted.number,
            step=wanted.step,
            url=f"{self._process.url}/checkpoints/{wanted.name}",
            seconds=context.event_log.monotonic() - started,
            size=done["size"],
        )

    async def _copy_folders(self) -> None:
        assert self._section is not None
        for kept, folder in FOLDERS.items():
            path = Path(self._context.state.directory) / folder
            if kept in self._section.keep and path.is_dir():
                await self._process.ask("copy", folder=str(path), name=folder)

    def _failed(self, problem: StoreProblem) -> None:
        log.warning("run %s: its store refuses: %s", self._context.run_id, problem)
        reason = f"store.url: {problem}"
        if reason != self._context.state.uploads.problem:
            self._post(ev.UploadFailed, reason=reason)

    def _post(self, kind: type[ev.RunEvent], **facts: Any) -> None:
        log_of = self._context.event_log
        log_of.post(kind(run=self._context.run_id, **facts))
