"""The run loop: one page, from PLANNING to the end. Reads like the life of a run.

Decides nothing about devices, slots or weights: it only says what comes next, and what to do when it fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import runs
from headrace_coordinator.ports import CallRefused, InstanceDown
from headrace_coordinator.run.checkpointing import Checkpointer
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.converge import converge, form_gang
from headrace_coordinator.run.evaluate import evaluate
from headrace_coordinator.run.members import Published
from headrace_coordinator.run.meter import Meter
from headrace_coordinator.run.placement import PlacementError
from headrace_coordinator.run.step import RunFailed, Step
from headrace_coordinator.waits import WaitTimeout

log = logging.getLogger(__name__)
USER_ERRORS = frozenset({"INVALID", "MODEL_NOT_READABLE", "UNIMPLEMENTED", "INVALID_ARGUMENT"})


class Interrupted(Exception):
    """A user wants the step in hand to stop: pause at once, or cancel."""


class RunLoop:
    """One run from its submission to its end."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.interrupt: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._kernel = context.kernel
        self._published: Published | None = None
        self._meter = Meter(context.kernel.monotonic)

    async def run(self) -> None:
        """Until the run is SUCCEEDED, FAILED, CANCELLED or PAUSED; every failure has a sentence."""
        try:
            while True:
                try:
                    await self._interruptible(self._live())
                    return
                except (InstanceDown, CallRefused, WaitTimeout) as fault:
                    await self._recover(fault)
        except Interrupted:
            await self._stop()
        except (RunFailed, PlacementError) as failure:
            await self._end(runs.FAILED, str(failure))

    async def _live(self) -> None:
        """Prepare, then steps until the last, then the end."""
        await self._prepare()
        checkpointer = Checkpointer(self.context)
        while True:
            await self._generate_ready()
            await self._evaluate_if_due()
            if self._finished():
                await self._succeed(checkpointer)
                return
            await checkpointer.announce()
            if self.context.state.wants_pause:
                await self._pause(checkpointer)
                return
            await self._step()
            if checkpointer.due():
                with self._meter.stage("checkpoint"):
                    await checkpointer.save(wait=False)

    async def _prepare(self) -> None:
        """Instances claimed and opened, leases held, gang formed, ledger and trainer at one version."""
        context = self.context
        if context.state.state == runs.RUNNING:
            self._move(runs.RECOVERING, "the coordinator restarted")
        elif context.state.state == runs.QUEUED:
            self._move(runs.PLANNING, "waiting for instances and devices")
        await context.crew.staff()
        context.placement.assign()
        await context.placement.learn()
        await form_gang(context)
        self._published = await converge(context)
        if context.state.state != runs.PAUSING:
            self._move(runs.RUNNING, "training")
        self._meter.restart()

    async def _generate_ready(self) -> None:
        """The rollouts hold their devices with the base version installed."""
        assert self._published is not None
        await self.context.crew.staff_rollouts(1)
        self.context.placement.assign()
        with self._meter.stage("switch" if self.context.placement.in_turns else "sync"):
            await self.context.placement.generate(self._published)

    async def _step(self) -> None:
        assert self._published is not None
        self._published = await Step(self.context, self._published, self._meter).run()

    async def _evaluate_if_due(self) -> None:
        context, section = self.context, self.context.spec.evaluation
        assert self._published is not None
        ordinal = self._published.version.ordinal
        due = ordinal == 0 or self._finished() or (section.every and ordinal % section.every == 0)
        if not context.dataset.heldout_items() or not due:
            return
        kinds: list[tuple[str, str | None]] = [("heldout", None)]
        if ordinal == 0 and section.baseline_prefill is not None:
            kinds.insert(0, ("baseline_prefill", section.baseline_prefill))
        for kind, prefill in kinds:
            if runs.evaluation_key(kind, ordinal) not in context.state.evaluated:
                view = await evaluate(context, self._published, kind, prefill)
                await self._kernel.commit(
                    ev.Evaluated(at=self._kernel.now(), run=context.run_id, view=view.model_dump(mode="json"))
                )
                context.projection.evaluation(view)
                self._meter.restart()

    def _finished(self) -> bool:
        return self.context.state.ledger.step >= self.context.spec.steps

    # --- ends

    async def _succeed(self, checkpointer: Checkpointer) -> None:
        context = self.context
        await context.placement.learn()
        if context.spec.checkpoint.enabled and context.state.lineage.head != context.state.last_checkpoint:
            await checkpointer.save(wait=True)
        if context.spec.export:
            path = await context.crew.leader.export("export")
            number = context.state.lineage.head
            await self._kernel.commit(
                ev.ModelExported(at=self._kernel.now(), run=context.run_id, path=path, number=number)
            )
        await self._end(runs.SUCCEEDED, f"{context.spec.steps} steps done")

    async def _pause(self, checkpointer: Checkpointer) -> None:
        await self.context.placement.learn()
        if self.context.spec.checkpoint.enabled:
            await checkpointer.save(wait=True)
        await self._let_go(close=False)
        self._move(runs.PAUSED, "paused; resume goes on from here")

    async def _stop(self) -> None:
        """Cancel or pause at once: the step's attempt is aborted, the last checkpoint stays."""
        state = self.context.state
        if state.ledger.open:
            opened = (state.ledger.step, state.ledger.attempt)
            await self._kernel.commit(
                ev.StepAborted(
                    at=self._kernel.now(),
                    run=state.id,
                    step=opened[0],
                    attempt=opened[1],
                    reason=self.interrupt.result(),
                )
            )
            await self._quietly(*(trainer.abort(*opened) for trainer in self.context.crew.trainers[:1]))
        await self._quietly(*(member.abort() for member in self.context.crew.rollouts))
        if state.state == runs.CANCELLING:
            await self._end(runs.CANCELLED, "cancelled by its user; the last checkpoint stays")
        else:
            await self._let_go(close=False)
            self._move(runs.PAUSED, "paused at once; the step in hand will be made again")

    async def _end(self, state: str, reason: str) -> None:
        reason = self.context.fleet.readable(reason)
        await self._let_go(close=True)
        for event in runs.plan_move(self.context.state, state, reason, self._kernel.now()):
            await self._kernel.commit(event)

    async def _let_go(self, *, close: bool) -> None:
        context = self.context
        if close:
            await self._quietly(*(member.close_run() for member in context.crew.members))  # type: ignore[attr-defined]
        await context.fleet.desk.release_all(context.run_id)
        context.fleet.unclaim(context.run_id)

    async def _quietly(self, *calls: Coroutine[Any, Any, Any]) -> None:
        """Calls whose failure changes nothing any more."""
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, InstanceDown | CallRefused):
                self.context.note(f"ignored at the end: {outcome}")
            elif isinstance(outcome, BaseException):
                raise outcome

    # --- faults

    async def _recover(self, fault: Exception) -> None:
        """Goes on from what is left; gives up on a user's error, a hopeless wait, or too many in a row."""
        run, limit = self.context.state, self.context.spec.limits.recoveries
        if isinstance(fault, CallRefused) and fault.reason in USER_ERRORS:
            raise RunFailed(fault.message) from fault
        if isinstance(fault, WaitTimeout):
            raise RunFailed(f"{fault}; raise limits.instance_timeout_s, or see `headrace leases`") from fault
        if run.recoveries_in_a_row >= limit:
            raise RunFailed(f"{limit} recoveries without a finished step; the last: {fault}") from fault
        reason = self.context.fleet.readable(str(fault))
        log.warning("run %s recovers: %s", run.id, reason)
        if run.state != runs.PAUSING:
            self._move(runs.RECOVERING, reason)
        await self._kernel.commit(ev.RunRecovering(at=self._kernel.now(), run=run.id, reason=reason))
        if isinstance(fault, InstanceDown):
            await self.context.fleet.fate(fault.incarnation)
        await asyncio.sleep(min(0.1 * 2**run.recoveries_in_a_row, 5.0))
        self.context.crew.adopt_leases()

    def _move(self, state: str, reason: str) -> None:
        self._kernel.post(*runs.plan_move(self.context.state, state, reason, self._kernel.now()))

    async def _interruptible(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self.interrupt}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return
            raise Interrupted
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
