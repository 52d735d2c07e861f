"""What the HTTP API may read: runs from their running figures, everything past from history files, by page.

A page is (entries, position to go on from, or None at the end). Decides nothing and writes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TypeVar

from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, nearest
from headrace_schema.resources.evaluations import ComparisonView, EvaluationRunView, VideoListView, VideoView
from headrace_schema.resources.overviews import CurvesView, FlowView, RunSummaryView
from headrace_schema.resources.views import (
    CertificateView,
    CheckpointView,
    DeviceView,
    EvaluationView,
    EventView,
    HealthView,
    InstanceView,
    KeyProblemView,
    LeaseView,
    RunView,
    StepView,
)
from headrace_schema.spec import RunSpec

from headrace_coordinator.api.archive import Archive
from headrace_coordinator.api.control import Page, Refused
from headrace_coordinator.api.reading import overviews as over
from headrace_coordinator.api.reading import presenters as present
from headrace_coordinator.api.reading.comparing import compare
from headrace_coordinator.api.submission.evaluations import origin_of
from headrace_coordinator.api.submission.forks import check_fork, unknown_origin
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.devices.scheduling import Plan
from headrace_coordinator.domain.ledger.compact import count, count_drops
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.projections.videos import FOLDER, episode_name, list_videos
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.run_files import RunFiles
from headrace_coordinator.vitals import Vitals

T = TypeVar("T")
LOOK_S = 5.0
SLOTS_A_PAGE = 20_000
"""Slots in a page of certificates: it ends with the one that reaches so many."""


class Reads:
    """The reading half of `control.Control`."""

    def __init__(
        self,
        event_log: EventLog,
        fleet: Fleet,
        busy: Callable[[str], bool],
        plan: Callable[[], Plan],
    ) -> None:
        """`busy` says whether a task works on a run; `plan` has who waits for what, and what others leave for it."""
        self.event_log = event_log
        self.fleet = fleet
        self._plan = plan
        self.vitals = Vitals(event_log)
        self._sparks = over.Sparks()
        self.archive = Archive(event_log, busy)

    # --- runs

    def _find(self, run_id: str) -> RunState:
        """A run that has not been archived; NOT_FOUND, or CONFLICT for one that has."""
        state = self.event_log.state
        if run := state.runs.get(run_id):
            return run
        if ended := state.ended.get(run_id):
            raise Refused("CONFLICT", f"run {run_id} is {ended.state}; nothing can change it any more")
        close = nearest(run_id, self._newest_first()[:200])
        hint = f"; did you mean {close}?" if close else ""
        raise Refused("NOT_FOUND", f"there is no run {run_id}{hint}")

    def _newest_first(self) -> list[str]:
        state = self.event_log.state
        created = {run: ended.created_at for run, ended in state.ended.items()}
        created |= {run.id: run.created_at for run in state.runs.values()}
        return sorted(created, key=created.__getitem__, reverse=True)

    def run_states(self) -> dict[str, int]:
        """See `Control.run_states`."""
        state = self.event_log.state
        return Counter(
            [run.state for run in state.runs.values()] + [run.state for run in state.ended.values()]
        )

    def runs(
        self, size: int, after: str = "", states: frozenset[str] = frozenset(), oldest_first: bool = False
    ) -> Page[RunView, str]:
        """See `Control.runs`."""
        names = self._newest_first()[:: -1 if oldest_first else 1]
        behind = names[names.index(after) + 1 if after else 0 :]
        found = list(islice((name for name in behind if self._matches(name, states, "")), size + 1))
        shown = found[:size]
        return [self.run(name) for name in shown], shown[-1] if len(found) > size else None

    async def summaries(
        self, size: int, after: str, states: frozenset[str], search: str
    ) -> tuple[list[RunSummaryView], str | None, int]:
        """See `Control.summaries`."""
        every = self._newest_first()
        place = every.index(after) + 1 if after else 0
        before = [name for name in every[:place] if self._matches(name, states, search)]
        behind = [name for name in every[place:] if self._matches(name, states, search)]
        shown = [await self._summary(self.run(name)) for name in behind[:size]]
        return shown, shown[-1].id if len(behind) > size else None, len(before) + len(behind)

    def _matches(self, name: str, states: frozenset[str], search: str) -> bool:
        state = self.event_log.state
        run = state.runs.get(name) or state.ended[name]
        return search.lower() in name.lower() and (not states or run.state in states)

    async def _summary(self, run: RunView) -> RunSummaryView:
        spark = self._sparks.known(run)
        if spark is None:
            spark = self._sparks.keep(run, await self.event_log.history.read(run.id, over.read_spark))
        return over.summary(run, spark)

    async def curves(self, run_id: str, points: int) -> CurvesView:
        """See `Control.curves`."""
        return await self._look(run_id, lambda files: over.read_curves(files, points))

    async def newest_events(self, run_id: str, size: int, before: int) -> Page[EventView, int]:
        """See `Control.newest_events`."""
        return await self._look(run_id, lambda files: over.read_events(files, size, before))

    def flow(self, run_id: str) -> FlowView:
        """See `Control.flow`."""
        ended = self.run(run_id).ended
        run = None if ended else self.event_log.state.runs.get(run_id)
        return present.flow_view(run, self.fleet.names)

    def run(self, run_id: str) -> RunView:
        """See `Control.run`."""
        if run_id in self.event_log.state.ended and run_id not in self.event_log.state.runs:
            return self.archive.view(run_id)
        run = self._find(run_id)
        plan = self._plan()
        queue = list(plan.waiting)
        place = queue.index(run_id) + 1 if run_id in queue and run.state == run_states.QUEUED else None
        return present.run_view(run, self._waiting_for(run), place, plan.gifts.get(run_id))

    def _waiting_for(self, run: RunState) -> list[str]:
        """What a run waits for now."""
        waiting = [self.fleet.readable(what) for what in self.fleet.waits.of(run.id)]
        waiting += self.fleet.silences(run.id)
        if self.event_log.store_away:
            waiting.append(f"the store (Redis) to accept writes: {self.event_log.store_trouble}")
        if self.event_log.history.trouble:
            waiting.append(f"the disk of the data directory: {self.event_log.history.trouble}")
        queue = self._plan().waiting
        if run.state == run_states.QUEUED and run.id in queue:
            waiting.append(self.fleet.readable(queue[run.id]))
        return waiting

    async def fork_problems(self, spec: RunSpec) -> list[KeyProblemView]:
        """Why a spec cannot continue from the checkpoint that it names; empty where it names none."""
        if spec.from_checkpoint is None:
            return []
        origin, names = spec.from_checkpoint.run, self._newest_first()
        if origin not in names:
            return [unknown_origin(origin, names[:200])]
        steps = [checkpoint.step for checkpoint in await self.checkpoints(origin)]
        live = self.event_log.state.runs.get(origin)
        saving = live is not None and live.state not in run_states.TERMINAL and live.last_checkpoint > 0
        return check_fork(spec, self.run(origin), steps, saving=saving)

    # --- evaluations of suites

    def suite_evaluations(self, size: int, after: str = "") -> Page[EvaluationRunView, str]:
        """See `Control.suite_evaluations`."""
        state = self.event_log.state
        names = [
            name
            for name in self._newest_first()
            if (
                state.runs[name].evaluation is not None
                if name in state.runs
                else state.ended[name].evaluation
            )
        ]
        start = names.index(after) + 1 if after else 0
        shown = names[start : start + size]
        views = [present.evaluation_run_view(self.run(name)) for name in shown]
        return views, shown[-1] if start + size < len(names) else None

    def suite_evaluation(self, evaluation_id: str) -> EvaluationRunView:
        """See `Control.suite_evaluation`."""
        run = self.run(evaluation_id)
        if run.suite is None:
            raise Refused("NOT_FOUND", f"{run.id} is a run that trains; see /v1/runs/{run.id}")
        return present.evaluation_run_view(run)

    async def compare_evaluations(self, first: str, second: str) -> ComparisonView:
        """See `Control.compare_evaluations`."""
        return await asyncio.to_thread(compare, self.run(first), self.run(second))

    async def evaluation_videos(self, evaluation_id: str) -> VideoListView:
        """See `Control.evaluation_videos`."""
        found = await asyncio.to_thread(list_videos, self._evaluation_directory(evaluation_id))
        return VideoListView(videos=[VideoView(**asdict(video)) for video in found])

    async def evaluation_video(self, evaluation_id: str, name: str) -> Path:
        """See `Control.evaluation_video`."""
        directory = self._evaluation_directory(evaluation_id)
        names = [video.name for video in await asyncio.to_thread(list_videos, directory)]
        if name not in names:
            have = f"it has {', '.join(names[:5])}" if names else "it has none"
            raise Refused("NOT_FOUND", f"evaluation {evaluation_id} has no video {name!r}; {have}")
        return directory / FOLDER / name

    async def evaluation_episode(self, evaluation_id: str, name: str) -> Path:
        """See `Control.evaluation_episode`."""
        video = await self.evaluation_video(evaluation_id, name)
        path = video.with_name(episode_name(video.name))
        if not await asyncio.to_thread(path.is_file):
            reason = f"evaluation {evaluation_id} kept the video {name!r} alone; evaluate again"
            raise Refused("NOT_FOUND", reason)
        return path

    def _evaluation_directory(self, evaluation_id: str) -> Path:
        self.suite_evaluation(evaluation_id)
        return Path(self.run(evaluation_id).run_directory)

    async def checkpoint_of(self, asked: EvaluationSpec) -> tuple[RunView | None, CheckpointView | None]:
        """The run and the checkpoint that are evaluated, if any; raises `Impossible`."""
        if asked.checkpoint is None:
            return None, None
        name, names = asked.checkpoint.run, self._newest_first()
        if name not in names:
            unknown = unknown_origin(name, names[:200])
            raise Impossible([unknown.model_copy(update={"key": "checkpoint.run"})])
        origin = self.run(name)
        return origin, origin_of(asked, origin, await self.checkpoints(name))

    # --- events

    async def events(self, run_id: str, after: int) -> AsyncIterator[EventView]:
        """See `Control.events`."""
        self.run(run_id)
        history = self.event_log.history
        while True:
            news = history.news.next()
            items = await history.page(run_id, after)
            for item in items:
                yield present.event_view(item)
                after = item[0]
            if not items:
                run = self.event_log.state.runs.get(run_id)
                if (run is None or run.state in run_states.TERMINAL) and history.complete(run_id, after):
                    return
                await asyncio.wait({news}, timeout=LOOK_S)

    # --- pages of what is past

    async def steps(self, run_id: str, size: int, after: int = -1) -> Page[StepView, int]:
        """See `Control.steps`."""

        def look(files: RunFiles) -> Page[StepView, int]:
            found = files.pages(files.steps, files.live_steps(), after)
            committed = ((place, event) for place, event in found if isinstance(event, ev.StepCommitted))
            return _page(committed, size, lambda event: present.step_view(event.view))

        return await self._look(run_id, look)

    async def evaluations(self, run_id: str, size: int, after: int = -1) -> Page[EvaluationView, int]:
        """See `Control.evaluations`."""

        def look(files: RunFiles) -> Page[EvaluationView, int]:
            found = files.pages(files.evaluations, files.live_evaluations(), after)
            made = ((place, event) for place, event in found if isinstance(event, ev.Evaluated))
            return _page(made, size, lambda event: present.evaluation_view(event.view))

        return await self._look(run_id, look)

    async def certificates(self, run_id: str, size: int, after: int = -1) -> Page[CertificateView, int]:
        """See `Control.certificates`."""

        def look(files: RunFiles) -> Page[CertificateView, int]:
            live = files.live_steps()
            found = files.pages(files.steps, [(0, len(files.steps))], after)
            shown: list[CertificateView] = []
            slots, last = 0, after
            for place, event in found:
                if not isinstance(event, ev.StepCommitted):
                    continue
                if len(shown) == size or slots >= SLOTS_A_PAGE:
                    return shown, last
                certificate, last = event.certificate, place
                slots += count(certificate.trained) + count_drops(certificate.dropped)
                shown.append(
                    present.certificate_view(certificate, any(low <= place < high for low, high in live))
                )
            return shown, None

        return await self._look(run_id, look)

    async def checkpoints(self, run_id: str) -> list[CheckpointView]:
        """See `Control.checkpoints`: those that the ledger knows and that still have their directory."""
        run = self.run(run_id)
        keep, directory = run.spec["checkpoint"]["keep"], Path(run.run_directory) / "checkpoints"

        def look(files: RunFiles) -> list[CheckpointView]:
            end, views = len(files.checkpoints), []
            for record in reversed(files.checkpoints.read(max(0, end - keep), end)):
                event, version = files.event(record), files.version(record.number)
                if not isinstance(event, ev.CheckpointSaved) or version is None:
                    continue
                if directory.is_dir() and not (directory / event.name).is_dir():
                    continue  # It was set aside, or deleted.
                views.append(
                    CheckpointView(
                        name=event.name,
                        version=present.policy_view(version),
                        step=event.step,
                        size_bytes=_size(directory / event.name),
                    )
                )
            return views

        return await self._look(run_id, look)

    async def _look(self, run_id: str, look: Callable[[RunFiles], T]) -> T:
        self.run(run_id)
        return await self.event_log.history.read(run_id, look)

    # --- the fleet

    def instances(self) -> list[InstanceView]:
        """See `Control.instances`."""
        return present.instance_views(self.fleet)

    def leases(self) -> list[LeaseView]:
        """See `Control.leases`."""
        return present.lease_views(self.fleet)

    def health(self) -> HealthView:
        """See `Control.health`."""
        return self.vitals.view()

    def devices(self) -> list[DeviceView]:
        """See `Control.devices`."""
        return present.device_views(self.fleet)


E = TypeVar("E", ev.StepCommitted, ev.Evaluated)


def _page(found: Iterator[tuple[int, E]], size: int, view: Callable[[E], T]) -> Page[T, int]:
    shown = list(islice(found, size))
    more = bool(shown) and next(found, None) is not None
    return [view(event) for _, event in shown], shown[-1][0] if more else None


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
