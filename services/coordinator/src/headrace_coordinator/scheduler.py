"""Admits runs, and runs the loop of each; changes the state of runs that hold nothing as their users ask.

The rules are `domain.devices.scheduling` and `domain.runs`; this applies them, one event at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from headrace_schema.problems import Impossible
from headrace_schema.progress import counting
from headrace_schema.sections.tracking import TrackingSection
from headrace_schema.spec import RunSpec
from headrace_servicekit.descriptors import lack_behind

from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.devices.scheduling import Plan, plan_admission
from headrace_coordinator.domain.pipelines import settled_followers
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.run.context import Projection, RunContext
from headrace_coordinator.run.evaluation.suite_loop import SuiteLoop
from headrace_coordinator.run.loop import RunLoop
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.trackers.processes import Trackers
from headrace_coordinator.waits import WaitTimeout

log = logging.getLogger(__name__)
LOOK_S = 5.0
"""A quantum ends without an event: the queue is planned again after so long."""
LACK_S = 2.0
"""How long a run stands still that found no descriptor, or no room on a disk; then it tries again."""
MakeProjection = Callable[[Path, TrackingSection], Projection]
OpenDataset = Callable[[RunSpec], Awaitable[Dataset]]


class Scheduler:
    """Runs the admission rule over all runs, and a task for each run that holds a grant."""

    def __init__(
        self, event_log: EventLog, fleet: Fleet, make_projection: MakeProjection, open_dataset: OpenDataset
    ) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.after_run: Callable[[], None] = lambda: None
        """Called when a run has ended, once nothing works on it any more."""
        self.plan = Plan([], {}, {}, {})
        """The newest plan: which runs wait, in order, and for what."""
        self._event_log = event_log
        self._fleet = fleet
        self._make_projection = make_projection
        self._open_dataset = open_dataset
        self._trackers = Trackers()

    async def run(self) -> None:
        """Admits and starts whatever may start, for ever."""
        while True:
            seen = self._event_log.state.scheduling_changes
            await self._settle_idle()
            for events in [*settled_followers(self._event_log.state)]:
                await self._event_log.commit(*events)
            await self._admit()
            for run in self._unstarted():
                self.tasks[run.id] = asyncio.create_task(self._control(run), name=f"run {run.id}")
            if self._event_log.state.scheduling_changes == seen:
                await self._look_again(seen)

    async def _look_again(self, seen: int) -> None:
        with contextlib.suppress(WaitTimeout):
            await self._event_log.wait_until(
                lambda: self._event_log.state.scheduling_changes != seen or bool(self._unstarted()),
                LOOK_S,
                "a run to schedule",
            )

    def _unstarted(self) -> list[RunState]:
        active = self._event_log.state.active_runs()
        return [run for run in active if run.grant is not None and run.id not in self.tasks]

    async def _settle_idle(self) -> None:
        """Runs that hold nothing follow their intent at once: there is no work to stop."""
        for run in list(self._event_log.state.active_runs()):
            if run.grant is None and run.id not in self.tasks:
                while (action := runs.next_action(run)).kind == run_states.MOVE:
                    reason = action.reason
                    if action.state == run_states.CANCELLED:
                        reason += f"; {runs.checkpoint_words(run)}"
                    await self._event_log.commit(*runs.plan_move(run, action.state, reason))

    async def _admit(self) -> None:
        """Appends grants one at a time, so that each equals the rule applied to the log before it."""
        while True:
            self.plan = plan = plan_admission(self._event_log.state, self._event_log.now())
            if not plan.grants:
                return
            grant = plan.grants[0]
            run = self._event_log.state.runs[grant.run]
            events: list[ev.Event] = [grant]
            if run.state == run_states.QUEUED:
                events += runs.plan_move(run, run_states.PLANNING, "its instances are being prepared")
            await self._event_log.commit(*events)

    async def _control(self, run: RunState) -> None:
        """Works on one run from its grant to its release; after any error nothing is open and nothing is held."""
        try:
            await self._work(run)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a bug, or a lack: it stops this run with its name, and no other
            if lack := lack_behind(error):
                await self._stand_still(run, lack)
                return
            if isinstance(error, Impossible):
                await self._abandon(run, str(error))
                return
            log.exception("run %s broke", run.id)
            reason = f"a bug in the coordinator ended the run: {type(error).__name__}: {error}"
            await self._abandon(run, reason)
        finally:
            self.tasks.pop(run.id, None)
            if run.state in run_states.TERMINAL:
                self._fleet.deaths.forget(run.id)
                self._fleet.lease_manager.take_ended(run.id)
                # The frames of this task, and with them all that the run had, are gone in the next turn of the loop.
                asyncio.get_running_loop().call_soon(self.after_run)
            self._event_log.wake()

    async def _work(self, run: RunState) -> None:
        spec = RunSpec.model_validate(run.spec)
        reading = "the coordinator reads the data"
        with counting() as far, self._fleet.waits.stage(run.id, reading, progress=far.read):
            dataset = await self._open_dataset(spec)
        if not await self._same_data(run, dataset):
            return
        directory = Path(run.directory)
        projection = self._make_projection(directory, spec.tracking)
        context = RunContext(self._event_log, self._fleet, run.id, spec, dataset, projection)
        try:
            projection.spec(run.spec)
            self._trackers.begin(spec.tracking, directory, partial(self._note, context))
            loop = RunLoop if run.evaluation is None else SuiteLoop
            async with context.uploads:
                await loop(context).run()
        finally:
            context.recording.close()
            projection.close()
            self._trackers.end(directory, run.state if run.state in run_states.TERMINAL else "")

    def _note(self, context: RunContext, text: str) -> None:
        """Tells the run's user; logs it where the run has ended so long ago that its events are archived."""
        if context.run_id in self._event_log.state.runs:
            context.note(text)
        else:
            log.warning("run %s: %s", context.run_id, text)

    async def _stand_still(self, run: RunState, lack: OSError) -> None:
        """The run goes on from its last event after a while, as after a restart of the coordinator; it is told why."""
        what = f"the coordinator's host to have room again: {lack}"
        log.warning("run %s waits for %s", run.id, what)
        if run.state in (run_states.PLANNING, run_states.RUNNING):
            await self._event_log.commit(*runs.plan_move(run, run_states.RECOVERING, f"waits for {what}"))
        with self._fleet.waits.named(run.id, what):
            await asyncio.sleep(LACK_S)

    async def _abandon(self, run: RunState, reason: str) -> None:
        """Fails a run whose loop broke: its leases end, and the reconciler closes what its instances report."""
        if run.state in run_states.TERMINAL:
            return
        await self._fleet.lease_manager.release_all(run.id)
        released = ev.RunReleased(run=run.id)
        await self._event_log.commit(released, *runs.plan_move(run, run_states.FAILED, reason))

    async def _same_data(self, run: RunState, dataset: Dataset) -> bool:
        """The items are those that the run began with; else it is paused, since its slots would mean other prompts."""
        if not run.dataset_digest:
            events: list[ev.Event] = [ev.DatasetOpened(run=run.id, digest=dataset.digest)]
            if dataset.contradicting:
                text = (
                    f"data.source: {dataset.repeated} items repeat an earlier question and are left out; "
                    f"{dataset.contradicting} questions are answered in more than one way, and their first answer "
                    "counts"
                )
                events.append(ev.Noted(run=run.id, text=text))
            await self._event_log.commit(*events)
        if run.dataset_digest == dataset.digest or run.state == run_states.CANCELLING:
            return True
        reason = (
            "data.source: its items are not those that the run began with; put them back and resume, "
            "or submit a new run"
        )
        await self._fleet.lease_manager.release_all(run.id)
        await self._event_log.commit(
            *runs.plan_intent(run, run_states.PAUSE, "system", reason),
            ev.RunReleased(run=run.id),
            *runs.plan_move(run, run_states.PAUSED, reason),
        )
        return False

    async def stop(self) -> None:
        """Cancels the loops where they are; a restart resumes their runs."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._trackers.stop()
