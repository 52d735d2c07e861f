"""The run loop: one page, from admission until the run pauses, yields or ends. Reads like the life of a run.

Decides nothing about devices, slots or weights: only what comes next, and what happens after a failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from headrace_servicekit.causes import cause_first
from headrace_servicekit.tracing import open_scope, trace

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.devices.placement import first_mode
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_coordinator.fleet.instance_client import USER_ERRORS, CallRefused, InstanceDown
from headrace_coordinator.run.asked.calls import Calls
from headrace_coordinator.run.checkpointing import Checkpointer
from headrace_coordinator.run.context import RunContext, Unwritable
from headrace_coordinator.run.converge import Misplaced, converge, form_trainer_group
from headrace_coordinator.run.devices.assignment import PlacementError
from headrace_coordinator.run.devices.autoplan import Autoplan
from headrace_coordinator.run.evaluation.evaluate import evaluate_if_due
from headrace_coordinator.run.leaving import Outcome, finish, hand_over, leave, save_head
from headrace_coordinator.run.regrouping import Regrouping
from headrace_coordinator.run.standstill import while_it_progresses
from headrace_coordinator.run.step.generation import Generation
from headrace_coordinator.run.step.given import GivenAnswers, answers_for
from headrace_coordinator.run.step.step import RunFailed, Step
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.opening import Unstaffed
from headrace_coordinator.waits import WaitTimeout

log = logging.getLogger(__name__)
DECISION_S = 900.0
"""How long a run that stops waits for the reply to a CommitStep that it has sent."""
FOREVER_S = 1e9
GROUP_LOST = frozenset({"TRAINER_GROUP_LOST", "RENDEZVOUS_TIMEOUT"})
"""Reasons of refusals by a trainer whose group has lost another rank, or could not be formed with it."""
NOT_OPEN = frozenset({"NOT_OPEN", "OPENING_STALE"})
"""Reasons of refusals by an instance that does not have the run open, or has another opening of it."""


class Stopped(Exception):
    """A user wants the open step to stop: pause at once, or cancel."""


class TrainerDrains(Exception):
    """A trainer of the run was told to stop."""


class RunLoop:
    """One run while it holds a grant. The only writer of the run's state meanwhile."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self._event_log = context.event_log
        self._published: Published | None = None
        self._timer = StepTimer(context.event_log.monotonic)
        context.leases.waited = self._timer.waited
        self._checkpointer = Checkpointer(context)
        self._calls = Calls(context, self._checkpointer, self._timer) if context.spec.is_session else None
        self._autoplan = Autoplan(context)
        self._regrouping = Regrouping(context)
        self._plan: ev.PlanAdopted | None = None
        """To be adopted at the boundary that it is the reason for."""
        self._steps = 0
        self._save_due = False
        self._keeps_until = 0.0

    async def run(self) -> None:
        """Works until the run pauses, yields or ends, then closes and releases everything by `leave`."""
        open_scope()
        await leave(self.context, self._checkpointer, await self._work())
        self.context.keep_time("leave", self.context.state.ledger.step, self._timer)

    async def _work(self) -> Outcome:
        while True:
            try:
                return await self._until_stopped(self._live())
            except Stopped:
                return self._stopped()
            except TrainerDrains:
                what = await hand_over(self.context, self._checkpointer)
                if outcome := self._stopped_meanwhile():
                    return outcome
                self._move(run_states.RECOVERING, f"a trainer was told to stop; {what}")
            except Unstaffed as lack:
                if await self._regrouping.shrink():
                    continue
                return Outcome(run_states.QUEUED, f"lacks {lack}; starts again when there is one")
            except (Misplaced, Unwritable) as problem:
                self._intend_pause(str(problem))
                return Outcome(run_states.PAUSED, str(problem))
            except (InstanceDown, CallRefused, WaitTimeout) as fault:
                await self.context.recording.failed(str(fault))
                if failure := await self._recover(fault):
                    return failure
            except PlacementError as misfit:
                if not await self._take_turns(misfit):
                    return Outcome(run_states.FAILED, str(misfit))
            except RunFailed as failed:
                await self.context.recording.failed(str(failed))
                return Outcome(run_states.FAILED, str(failed))

    async def _live(self) -> Outcome:
        """Prepares, then makes steps until the last, or until the run is to pause or yield."""
        await self._prepare()
        async with self._checkpointer.beside():
            while True:
                await self._regroup_if_due()
                await self._follow_plan()
                await self._check_disk()
                await self._begin_recording()
                self._save_beside()
                published = await self._generate_ready()
                await evaluate_if_due(self.context, published, self._timer)
                if self.context.finished:
                    await self.context.snapshot_taken()
                    ended = await finish(self.context, self._checkpointer)
                    return self._unjudged() or ended
                await self._checkpointer.announce()
                if boundary := self._at_boundary():
                    await self.context.snapshot_taken()
                    if boundary.state != run_states.QUEUED or await self._can_yield():
                        return boundary
                    continue  # The trainers have the devices now: they were needed for saving.
                await self._work_on()

    def _unjudged(self) -> Outcome | None:
        """A run none of whose answers has a verdict has learned nothing that anybody measured."""
        totals = self.context.state.totals
        failed = totals.scorer_failed
        if self.context.judged or totals.judged or not failed:
            return None
        what = "no answer has a verdict: the scorer failed at every one, at the first so"
        return Outcome(run_states.FAILED, cause_first(failed, what, "reward.scorers"))

    async def _prepare(self) -> None:
        """Instances opened, leases held, trainer group formed, ledger and trainer at one version."""
        context = self.context
        if context.state.state == run_states.RUNNING:
            self._move(run_states.RECOVERING, "the coordinator restarted")
        await self._regrouping.shrink()
        await context.staffing.staff()
        context.leases.assign()
        await context.devices.hand_devices_to_trainers()
        await form_trainer_group(context)
        await context.recall()  # A commit that `converge` records knows the items of the steps before it.
        self._published = await converge(context)
        context.regrouping = False
        await context.recall()
        if context.state.origin_checkpoint and not context.state.last_checkpoint:
            # The origin may delete the checkpoint that this run began with.
            await self._checkpointer.save(wait=True)
        context.agreement_due = True
        if self._calls is not None:
            await self._calls.begin(self._published)
        if context.state.state in (run_states.PLANNING, run_states.RECOVERING):
            self._move(run_states.RUNNING, "training")
        context.keep_time("prepare", context.state.ledger.step, self._timer)

    async def _begin_recording(self) -> None:
        """What is said from now on is of the next step; a recording of it begins with a checkpoint."""
        recording = self.context.recording
        if recording.due():
            try:
                with self._timer.stage("checkpoint"):
                    await save_head(self.context, self._checkpointer)
                recording.based_on_head()
            except RunFailed as failed:
                recording.not_based(str(failed))
        recording.begin()

    async def _generate_ready(self) -> Published:
        """The base version, once the rollouts hold their devices with it installed."""
        assert self._published is not None
        if self.context.spec.has_given_answers or self._calls is not None:
            return self._published
        await self.context.staffing.staff_rollouts()
        self.context.leases.assign()
        with self._timer.stage("switch" if self.context.workers.placement.turns else "sync"):
            await self.context.devices.hand_devices_to_rollouts(self._published)
        return self._published

    async def _work_on(self) -> None:
        """One step. Where answers may be older, steps follow each other until a boundary, and generation goes on."""
        assert self._published is not None
        if self._calls is not None:
            self._published = await self._calls.work(self._boundary_due)
            self._steps = self._calls.done
            if self._calls.idle:
                self._intend_pause(self._calls.idle)
            return
        if self.context.begins_stage:
            most = self.context.spec.sampling.longest_at(self.context.state.ledger.step)
            self.context.note(
                f"answers have up to {most:,} tokens from this step on (sampling.stages)", plain=True
            )
        generation = answers_for(self.context, self._published, self._timer)
        try:
            await self._step(generation)
            while generation.goes_on and not self._boundary_due():
                await self._checkpointer.announce()
                generation.install(self._published)
                self._save_beside()
                await self._step(generation)
        finally:
            await generation.stop()

    def _boundary_due(self) -> bool:
        """Whether something is to be done that needs the rollouts, or the devices, without answers in hand."""
        context = self.context
        self._plan = self._plan or self._autoplan.due_move()
        over = (
            context.finished
            or context.begins_stage
            or context.evaluation_due()
            or self._regrouping.due() is not None
        )
        over = over or self._disk_due or self._plan is not None or context.recording.due()
        return over or self._at_boundary() is not None

    async def _step(self, generation: Generation | GivenAnswers) -> None:
        await self.context.prepare_items()
        step = Step(generation)
        number = self.context.state.ledger.step + 1
        self.context.recording.begin()
        with trace(f"step {number}", run=self.context.run_id, step=number):
            self._published = await while_it_progresses(self.context, step.run())
        if self.context.curriculum:
            self.context.curriculum.observe(step.observed)
        self._autoplan.observe(step.view, step.learned_after_s)
        self._steps += 1
        await self.context.recording.end()
        self._save_due = self._checkpointer.due()
        if self._save_due and self.context.workers.placement.rollouts_wait:
            self._save_due = False
            with self._timer.stage("checkpoint"):
                await self._checkpointer.save(wait=False)

    def _save_beside(self) -> None:
        """A checkpoint that is due: the trainer copies its state while rollouts install the version and generate."""
        if self._save_due:
            self._save_due = False
            self._checkpointer.begin(self._timer)

    async def _regroup_if_due(self) -> None:
        """Between two steps: the trainer group gets the size that is wanted."""
        works = runs.next_action(self.context.state).kind == run_states.WORK
        if self.context.finished or not works or not self._regrouping.due():
            return
        with self._timer.stage("regroup"):
            self._published = await self._regrouping.change()
        self._autoplan, self._plan = Autoplan(self.context), None
        self.context.agreement_due = True

    async def _follow_plan(self) -> None:
        """Between two steps: adopts a better placement, or proposes it."""
        plan, self._plan = self._plan or self._autoplan.due(), None
        if plan is None:
            return
        workers, before = self.context.workers, self.context.workers.placement
        await self._event_log.commit(plan)
        self.context.note(f"plan: {plan.reason}", plain=True)
        if workers.placement != before:
            with self._timer.stage("switch"):
                await self.context.devices.change()
            self._autoplan.changed()

    @property
    def _disk_due(self) -> bool:
        """Whether the disk refuses files of the run, and it has not just found that it cannot pause for that."""
        return bool(self.context.disk_trouble) and self._event_log.monotonic() >= self._keeps_until

    async def _check_disk(self) -> None:
        """Raises `Unwritable` where the disk refuses files of the run and its head is saved: else it goes on."""
        trouble = self.context.disk_trouble
        if self._disk_due and await self._can_yield():
            raise Unwritable(f"{trouble}; make room and resume")

    # --- what the user wants, and what other runs need

    def _obey(self) -> str:
        """Moves the run's state as its intent asks; returns the kind of the next action."""
        while (action := runs.next_action(self.context.state)).kind == run_states.MOVE:
            self._move(action.state, action.reason)
        return action.kind

    def _at_boundary(self) -> Outcome | None:
        """Between two steps: whether the run pauses, or yields after at least one step."""
        if self._obey() == run_states.STOP_AT_BOUNDARY:
            idle = self._calls.idle if self._calls is not None else ""
            return Outcome(run_states.PAUSED, idle or "paused; resume goes on from here")
        waiting = any(run.state == run_states.QUEUED for run in self._event_log.state.active_runs())
        if not waiting or not self._steps or self._event_log.monotonic() < self._keeps_until:
            return None
        reason = plan_admission(self._event_log.state, self._event_log.now()).yields.get(self.context.run_id)
        return Outcome(run_states.QUEUED, reason) if reason else None

    async def _can_yield(self) -> bool:
        """Whether the head was saved. A run that yielded without would make the same steps again in each turn."""
        try:
            await save_head(self.context, self._checkpointer)
        except RunFailed as failed:
            self.context.note(cause_first(str(failed), "keeps its instances for another quantum"))
            self._keeps_until = self._event_log.monotonic() + self.context.state.quantum_s
            return False
        return True

    def _stopped_meanwhile(self) -> Outcome | None:
        """The outcome of a run without an open step that is to pause or to be cancelled; None: it goes on."""
        action = self._obey()
        if action == run_states.STOP_AT_BOUNDARY:
            return Outcome(run_states.PAUSED, "paused; resume goes on from here")
        return self._stopped() if action == run_states.STOP_NOW else None

    def _stopped(self) -> Outcome:
        if self.context.state.state == run_states.CANCELLING:
            kept = runs.checkpoint_words(self.context.state)
            return Outcome(run_states.CANCELLED, f"cancelled by its user; {kept}")
        return Outcome(
            run_states.PAUSED, "paused at once; the step in hand was aborted and will be made again"
        )

    def _intend_pause(self, reason: str) -> None:
        self._event_log.post(*runs.plan_intent(self.context.state, run_states.PAUSE, "system", reason))

    async def _until_stopped(self, work: Coroutine[Any, Any, Outcome]) -> Outcome:
        """The outcome of `work`; raises `Stopped` or `TrainerDrains`, once a commit that was sent has its reply."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._stop_asked())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._decided()
            if task.done():
                return task.result()
            raise watch.result()
        finally:
            parts: list[asyncio.Future[Any]] = [task, watch]
            if self.context.decision is not None:
                parts.append(self.context.decision)
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _stop_asked(self) -> Exception:
        """Waits for a reason to stop the open step, and returns it."""
        fleet, workers = self.context.fleet, self.context.workers

        def news() -> bool:
            action = runs.next_action(self.context.state).kind
            return action in (run_states.MOVE, run_states.STOP_NOW) or fleet.any_draining(workers.trainers)

        while True:
            await self._event_log.wait_until(news, FOREVER_S, "a user's intent")
            if self._obey() == run_states.STOP_NOW:
                return Stopped()
            if fleet.any_draining(workers.trainers):
                return TrainerDrains()

    async def _decided(self) -> None:
        if (decision := self.context.decision) is not None and not decision.done():
            with self.context.fleet.waits.named(self.context.run_id, "the commit in hand to be decided"):
                await asyncio.wait({decision}, timeout=DECISION_S)

    # --- faults

    async def _take_turns(self, misfit: PlacementError) -> bool:
        """Lets a run with `auto` take turns on the devices that are left; False if it takes turns already."""
        context = self.context
        ahead = context.spec.algorithm.max_staleness
        if context.spec.placement.mode != "auto" or context.workers.placement.turns or ahead:
            return False
        plan = ev.PlanAdopted(
            run=context.run_id,
            from_step=context.state.ledger.step,
            mode=first_mode(ahead=False),
            reason=str(misfit),
        )
        await self._event_log.commit(plan)
        if context.state.state == run_states.RUNNING:
            self._move(run_states.RECOVERING, f"{misfit}; takes turns on the devices that are left")
        context.workers.adopt_leases()
        return True

    async def _recover(self, fault: Exception) -> Outcome | None:
        """Prepares to go on after a fault; an outcome where the spec is wrong, or the run has recovered too often."""
        run, limit = self.context.state, self.context.spec.limits.recoveries
        if isinstance(fault, CallRefused) and fault.reason in USER_ERRORS:
            named = fault.key if fault.cause != fault.message else ""
            return Outcome(run_states.FAILED, cause_first(fault.cause, "", named))
        if run.recoveries_in_a_row >= limit:
            what = f"{limit} recoveries without progress"
            cause = self.context.fleet.readable(str(fault))
            return Outcome(run_states.FAILED, cause_first(cause, what, "limits.recoveries"))
        reason = self.context.fleet.readable(str(fault))
        log.warning("run %s recovers: %s", run.id, reason)
        if run.state in (run_states.PLANNING, run_states.RUNNING):
            self._move(run_states.RECOVERING, reason)
        await self._event_log.commit(ev.RunRecovering(run=run.id, reason=reason))
        if isinstance(fault, InstanceDown):
            await self.context.fleet.fate(fault.incarnation)
        elif isinstance(fault, CallRefused) and fault.reason in GROUP_LOST:
            # Before the next call: one to a rank that is dead would be charged as a recovery of its own.
            trainers = [trainer.incarnation for trainer in self.context.workers.trainers]
            await self.context.fleet.fate_of_any(trainers)
        elif isinstance(fault, CallRefused) and fault.reason in NOT_OPEN:
            self.context.workers.reopen(fault.incarnation)
        await asyncio.sleep(min(0.1 * 2**run.recoveries_in_a_row, 5.0))
        self.context.workers.adopt_leases()
        return None

    def _move(self, state: str, reason: str) -> None:
        self._event_log.post(*runs.plan_move(self.context.state, state, reason))
