"""What is past of a run, from its history files, by page: events, steps, evaluations, certificates, checkpoints.

A page is (entries, position to go on from, or None at the end).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from headrace_schema.resources.evaluations import EvaluationView
from headrace_schema.resources.overviews import CurvesView
from headrace_schema.resources.views import CertificateView, CheckpointView, EventView, PolicyView, StepView

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.api.reading.curves import read_curves
from headrace_coordinator.api.reading.presenters import (
    brief_event_view,
    certificate_view,
    event_view,
)
from headrace_coordinator.api.reading.reads import Page, Reads
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.access import OPERATE
from headrace_coordinator.domain.ledger.compact import count, count_drops
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.run_files import CHECKPOINT, EVALUATION, STEP, UPLOAD, RunFiles

T = TypeVar("T")
E = TypeVar("E", ev.StepCommitted, ev.Evaluated)
LOOK_S = 5.0
SLOTS_A_PAGE = 20_000
"""Most slots in a page of certificates: the page ends with the certificate that reaches them."""


class Past:
    """The histories of runs, archived ones included; NOT_FOUND for a run that there is not."""

    def __init__(self, event_log: EventLog, reads: Reads) -> None:
        self._event_log = event_log
        self._reads = reads

    async def events(self, run_id: str, after: int, *, follow: bool = True) -> AsyncIterator[EventView]:
        """Events with ids above `after`, then live ones; ends when the run has ended and all were sent.

        Without `follow` it ends with the events that there are.
        """
        self._reads.run(run_id)
        history = self._event_log.history
        while True:
            news = history.news.next()
            items = await history.page(run_id, after)
            for item in items:
                yield self._shown(event_view(item))
                after = item[0]
            if not items and not follow:
                return
            if not items:
                run = self._event_log.state.runs.get(run_id)
                if (run is None or run.state in run_states.TERMINAL) and history.complete(run_id, after):
                    return
                await asyncio.wait({news}, timeout=LOOK_S)

    async def newest_events(self, run_id: str, size: int, before: int) -> Page[EventView, int]:
        """Events with ids below `before`, newest first, with the number of slots in place of lists of them."""

        def look(files: RunFiles) -> Page[EventView, int]:
            found = files.before(before, size + 1)
            views = [brief_event_view(number, event) for number, event in found[:size]]
            return views, views[-1].id if len(found) > size else None

        views, place = await self._look(run_id, look)
        return [self._shown(view) for view in views], place

    def _shown(self, view: EventView) -> EventView:
        """An event as its caller may read it: without names of others' runs."""
        if CALLER.get().may(OPERATE):
            return view
        return view.model_copy(update={"data": self._reads.discreet(view.data)})

    async def curves(self, run_id: str, points: int) -> CurvesView:
        """Figures of at most `points` steps of the live lineage."""
        return await self._look(run_id, lambda files: read_curves(files, points))

    async def steps(self, run_id: str, size: int, after: int = -1) -> Page[StepView, int]:
        """Committed steps of the live lineage behind a position, oldest first."""

        def look(files: RunFiles) -> Page[StepView, int]:
            return _page(files.live(STEP, after), size, lambda event: StepView.from_json(event.view))

        return await self._look(run_id, look)

    async def evaluations(self, run_id: str, size: int, after: int = -1) -> Page[EvaluationView, int]:
        """Evaluations of the live lineage behind a position, oldest first."""

        def look(files: RunFiles) -> Page[EvaluationView, int]:
            return _page(
                files.live(EVALUATION, after), size, lambda event: EvaluationView.from_json(event.view)
            )

        return await self._look(run_id, look)

    async def certificates(
        self, run_id: str, size: int, after: int = -1, *, newest: bool = False
    ) -> Page[CertificateView, int]:
        """Certificates behind a position, oldest (or newest) first, abandoned ones too; fewer where they are large."""

        def look(files: RunFiles) -> Page[CertificateView, int]:
            shown: list[CertificateView] = []
            slots, last = 0, after
            for number, event, live in files.certificates(after, newest=newest):
                if len(shown) == size or slots >= SLOTS_A_PAGE:
                    return shown, last
                assert isinstance(event, ev.StepCommitted)
                certificate, last = event.certificate, number
                slots += count(certificate.trained) + count_drops(certificate.dropped)
                shown.append(certificate_view(certificate, live))
            return shown, None

        return await self._look(run_id, look)

    async def checkpoints(self, run_id: str) -> list[CheckpointView]:
        """Durable checkpoints, newest first: those that the ledger knows and that still have their directory."""
        run = self._reads.run(run_id)
        keep, directory = run.spec["checkpoint"]["keep"], Path(run.run_directory) / "checkpoints"

        def look(files: RunFiles) -> list[CheckpointView]:
            views, uploaded = [], files.newest(UPLOAD, keep)
            remote = {each.name: each.url for each in uploaded if isinstance(each, ev.CheckpointUploaded)}
            for event in files.newest(CHECKPOINT, keep):
                if (
                    not isinstance(event, ev.CheckpointSaved)
                    or (version := files.version(event.number)) is None
                ):
                    continue
                if directory.is_dir() and not (directory / event.name).is_dir():
                    continue  # It was set aside, or deleted.
                views.append(
                    CheckpointView(
                        name=event.name,
                        version=PolicyView.of(version),
                        step=event.step,
                        size_bytes=_size(directory / event.name),
                        remote=remote.get(event.name, ""),
                    )
                )
            return views

        return await self._look(run_id, look)

    async def _look(self, run_id: str, look: Callable[[RunFiles], T]) -> T:
        self._reads.run(run_id)
        return await self._event_log.history.read(run_id, look)


def _page(found: Iterator[tuple[int, ev.Event]], size: int, view: Callable[[Any], T]) -> Page[T, int]:
    shown = list(islice(found, size))
    more = bool(shown) and next(found, None) is not None
    return [view(event) for _, event in shown], shown[-1][0] if more else None


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
