"""The one exit of a run that holds a grant: settles its commit, saves, closes, releases, and then changes its state.

Every pause, yield, end and failure goes through `leave`. An instance that does not close the run is killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from headrace_servicekit.causes import cause_first

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown, WorkerClient
from headrace_coordinator.fleet.reconciler import SHARED
from headrace_coordinator.run.checkpointing import Checkpointer
from headrace_coordinator.run.context import RunContext, Unwritable
from headrace_coordinator.run.converge import converge, form_trainer_group, settle_commit
from headrace_coordinator.run.step.step import RunFailed
from headrace_coordinator.run.workers.opening import Unstaffed
from headrace_coordinator.waits import WaitTimeout

log = logging.getLogger(__name__)
LEAVE_S = 180.0
"""How long the last commit may take to be settled, and the head to be saved, before instances are killed."""
CLOSING_S = 60.0
"""How long an instance may refuse to close the run, or leave it unanswered, before it is killed."""
CLOSING_SHOWN_S = 5.0
"""A close that lasts so long is shown as what the run waits for; a usual one takes less than a second."""
CLOSE_AGAIN_S = 0.5
EXPORT_FAILED = "EXPORT_FAILED"
"""A trainer's refusal where the disk does not take the model."""
UNOPENED_S = 5.0
"""How long an instance that has not answered OpenRun is asked to close: a late opening is closed by the reconciler."""
Fault = (InstanceDown, CallRefused, WaitTimeout, RunFailed, Unstaffed, TimeoutError)


class Outcome(msgspec.Struct, frozen=True):
    """The state that a run leaves for, and why."""

    state: str
    reason: str


async def finish(context: RunContext, checkpointer: Checkpointer) -> Outcome:
    """All steps are made: saves and exports the model.

    Raises RunFailed where nothing was trained, and `Unwritable` where the disk has no room for the model: once it has,
    a resumed run has only that to do.
    """
    tally = context.state.totals.tally
    if tally.dropped and not tally.trained:
        raise RunFailed(
            cause_first(
                context.state.ledger.last_drop,
                f"nothing was trained: all {tally.dropped} slots of {context.spec.steps} steps were dropped, the last "
                "of them so",
            )
        )
    await context.devices.hand_devices_to_trainers()
    if context.spec.checkpoint.enabled and context.state.lineage.head != context.state.last_checkpoint:
        await checkpointer.save(wait=True)
    if context.spec.export:
        try:
            path = await context.workers.leader.export("export")
        except CallRefused as refused:
            if refused.reason != EXPORT_FAILED:
                raise
            raise Unwritable(f"export: {refused.message}; make room and resume") from refused
        number = context.state.lineage.head
        await context.event_log.commit(ev.ModelExported(run=context.run_id, path=path, number=number))
    steps = context.state.ledger.step if context.closed else context.spec.steps
    return Outcome(run_states.SUCCEEDED, f"{steps} step{'' if steps == 1 else 's'} done")


async def leave(context: RunContext, checkpointer: Checkpointer, outcome: Outcome) -> None:
    """Closes the run at its instances, releases its leases, then moves it to its outcome.

    A run that pauses or yields first saves its recorded head, whatever its checkpoint section says.
    """
    reason = outcome.reason
    await context.staffing.score_streams.end()
    if outcome.state not in run_states.TERMINAL or outcome.state == run_states.CANCELLED:
        lost = await _settled(
            context, checkpointer, save=outcome.state in (run_states.PAUSED, run_states.QUEUED)
        )
        reason += f"; {lost}" if lost else ""
    await close(context, context.workers.everyone)
    await context.fleet.lease_manager.release_all(context.run_id)
    if outcome.state not in (run_states.QUEUED, run_states.CANCELLED):
        await context.uploads.finish()
    state = outcome.state
    if context.state.state == run_states.CANCELLING and state not in (
        run_states.CANCELLED,
        run_states.FAILED,
    ):
        state, reason = run_states.CANCELLED, f"cancelled by its user while it was leaving ({reason})"
    await context.event_log.commit(
        ev.RunReleased(run=context.run_id),
        *runs.plan_move(context.state, state, context.fleet.readable(reason)),
    )


async def _settled(context: RunContext, checkpointer: Checkpointer, *, save: bool) -> str:
    """Ends the open attempt; with `save`, makes the head durable. Returns what was lost, in words."""
    try:
        shares = context.spec.placement.share  # Its devices may have to be waited for.
        async with asyncio.timeout(LEAVE_S + (context.spec.limits.step_timeout_s if shares else 0.0)):
            await _abort_step(context)
            if save:
                await save_head(context, checkpointer)
    except Fault as fault:
        log.warning("run %s leaves without its last state: %s", context.run_id, fault)
        if context.state.ledger.open:
            await context.record_abort("the run stops")
        return f"its state could not be saved ({fault}): it goes back to the last checkpoint" if save else ""
    return ""


async def _abort_step(context: RunContext) -> None:
    for rollout in context.workers.producers:
        try:
            await rollout.abort()
        except (InstanceDown, CallRefused) as fault:
            context.note(f"ignored while stopping: {fault}")
    if context.state.ledger.open and not context.workers.trainers:
        await context.staffing.staff_trainers()  # The coordinator restarted: the trainer may have committed.
    trainers = context.workers.trainers
    # A leader that has not opened the run has committed nothing of it since: it may not answer at all.
    if trainers and (context.state.ledger.open or trainers[0].opened):
        await settle_commit(context)


async def save_head(context: RunContext, checkpointer: Checkpointer) -> None:
    """A durable checkpoint of the recorded head; nothing where the head is saved or there is none.

    Raises RunFailed when it cannot be written.
    """
    head = context.state.lineage.head
    if not head or context.state.last_checkpoint == head:
        return
    unsure = context.regrouping or not context.workers.trainers
    if unsure:
        await context.staffing.staff_trainers()
    await context.devices.hand_devices_to_trainers()
    if unsure and (await context.workers.leader.step_state()).carried_number == head:
        await form_trainer_group(context)  # A change of the trainer group was interrupted.
        await converge(context)
    await checkpointer.save(wait=True)
    if context.state.last_checkpoint != head:
        raise RunFailed(cause_first(checkpointer.last_failure, "the checkpoint could not be written"))


async def close(context: RunContext, workers: Sequence[WorkerClient]) -> None:
    """Closes the run at `workers`; kills those that do not close it in time, unless they serve other runs too.

    What reward instances and simulators keep is closed by the reconciler.
    """

    async def one(worker: WorkerClient) -> None:
        if not worker.opened:
            with suppress(TimeoutError, InstanceDown, CallRefused):
                async with asyncio.timeout(UNOPENED_S):
                    await worker.close_run()
            return
        fleet, deadline = context.fleet, context.event_log.monotonic() + CLOSING_S
        while True:
            try:
                return await worker.close_run()
            except (InstanceDown, CallRefused) as fault:
                if not fleet.alive(worker.incarnation) or worker.instance.kind in SHARED:
                    return
                if context.event_log.monotonic() >= deadline:
                    fleet.kill(worker.incarnation, f"it did not close {context.run_id}: {fault}")
                    return
            await asyncio.sleep(CLOSE_AGAIN_S)

    with context.fleet.waits.named(context.run_id, "its instances to close it", after=CLOSING_SHOWN_S):
        await asyncio.gather(*(one(worker) for worker in workers))


async def hand_over(context: RunContext, checkpointer: Checkpointer) -> str:
    """A trainer was told to stop: saves its state, closes the run at the trainers, and lets draining ones exit.

    Returns, in words, whether the state is saved.
    """
    lost = await _settled(context, checkpointer, save=True)
    trainers, context.workers.trainers = context.workers.trainers, []
    await close(context, trainers)
    await context.fleet.lease_manager.release_of(context.run_id, [each.incarnation for each in trainers])
    for each in trainers:
        if context.fleet.any_draining([each]):
            context.fleet.drained(each.incarnation)
    return lost or "its state is saved"
