"""Brings the gang and the ledger to one version: adopt, record what was committed, or rewind.

The one path for a start, a lost trainer, a restarted coordinator and a resumed pause.
"""

from __future__ import annotations

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.slots import ACCUMULATED
from headrace_coordinator.run.checkpointing import missing_steps, read_ledger
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.generation import Batch
from headrace_coordinator.run.members import Published, TrainerMember
from headrace_coordinator.run.meter import Meter
from headrace_coordinator.run.step import Step
from headrace_coordinator.run.together import together


async def form_gang(context: RunContext) -> None:
    """All trainer members meet under a new generation; a gang of the same processes stays as it is."""
    members, run = context.crew.trainers, context.state
    states = [await member.state() for member in members]
    incarnations = [member.incarnation for member in members]
    same = run.gang == incarnations and all(s.generation == run.gang_generation for s in states)
    if same and run.gang_generation:
        return
    generation = run.gang_generation + 1
    formed = ev.GangFormed(at=context.kernel.now(), run=run.id, generation=generation, members=incarnations)
    await context.kernel.commit(formed)
    host = members[0].instance.address.rpartition(":")[0]
    # Port 0 lets rank 0 choose; with several ranks it must be known to all before they meet.
    rendezvous = f"{host}:{29500 + generation % 1000 if len(members) > 1 else 0}"
    timeout = context.crew.fleet_timeout

    async def join(member: TrainerMember) -> None:
        await member.join(generation, len(members), rendezvous, timeout)

    await together(*(join(member) for member in members))


async def converge(context: RunContext) -> Published:
    """The trainer holds the ledger's head, recorded and published; returns it."""
    state = await context.crew.leader.state()
    open_step = context.state.ledger
    if _committed_here(context, state):
        await _record_commit(context, state)
    elif state.phase == trainer.STEP_PHASE_ACCUMULATING:
        await context.crew.leader.abort(state.step, state.attempt)
    if open_step.open:
        await _close_attempt(context, "the step was interrupted")
    base = context.state.lineage.base
    if base is None or state_number(await context.crew.leader.state()) != base.number:
        await _restore(context)
    base = context.state.lineage.base
    assert base is not None
    return await context.crew.leader.publish(base.number)


def state_number(state: trainer.GetStepStateResponse) -> int:
    """The version a trainer holds; 0 when it holds none that is usable."""
    return state.version.number if state.phase == trainer.STEP_PHASE_IDLE else 0


def _committed_here(context: RunContext, state: trainer.GetStepStateResponse) -> bool:
    """The trainer made a version, and the ledger knows everything that went into it, or has recorded it."""
    if state.phase != trainer.STEP_PHASE_COMMITTED:
        return False
    run = context.state
    if run.lineage.head == state.commit.version.number:
        return True
    ledger = run.ledger
    return (
        ledger.open
        and (ledger.step, ledger.attempt) == (state.step, state.attempt)
        and not ledger.unsettled()
        and len(ledger.members(ACCUMULATED)) == state.commit.sequence_count
    )


async def _record_commit(context: RunContext, state: trainer.GetStepStateResponse) -> None:
    number = state.commit.version.number
    if context.state.lineage.head == number:
        await context.crew.leader.recorded(state.step, state.attempt, number)
        return
    base = context.state.lineage.base
    assert base is not None
    opened = ev.StepOpened(
        at=context.kernel.now(),
        run=context.run_id,
        step=state.step,
        attempt=state.attempt,
        base=base.number,
        number=number,
    )
    step = Step(
        context,
        Published(state.version, common.WeightManifest(), common.WeightSource()),
        Meter(context.kernel.now),
    )
    await step.record(opened, state.commit, Batch())


async def _close_attempt(context: RunContext, reason: str) -> None:
    ledger = context.state.ledger
    await context.kernel.commit(
        ev.StepAborted(
            at=context.kernel.now(),
            run=context.run_id,
            step=ledger.step,
            attempt=ledger.attempt,
            reason=reason,
        )
    )


async def _restore(context: RunContext) -> None:
    """Rewinds to the newest checkpoint of this run, or to the initial model."""
    kernel, run = context.kernel, context.state
    checkpoint, ledger = await _newest(context)
    for step in missing_steps(ledger, range(run.lineage.newest + 1)):
        await kernel.commit(step)
    if ledger.get("coordinator_epoch", 0) > kernel.state.epoch:
        await kernel.commit(ev.EpochRaised(at=kernel.now(), epoch=ledger["coordinator_epoch"] + 1))
    number = max(run.lineage.last_number, ledger.get("last_number", 0)) + 1
    await kernel.commit(ev.NumberBurnt(at=kernel.now(), run=run.id, number=number))
    name = checkpoint.name if checkpoint else ""
    response = await context.crew.leader.restore(name, number, kernel.state.store_id)
    frontier_step = ledger.get("frontier_step", 0)
    await kernel.commit(
        ev.VersionRestored(
            at=kernel.now(),
            run=run.id,
            number=number,
            parent=checkpoint.version.number if checkpoint else 0,
            ordinal=response.version.ordinal,
            digest=response.version.digest,
            checkpoint=name,
            frontier_step=frontier_step,
            warmup_steps=response.warmup_steps,
            figures=dict(response.figures),
            kept=await kernel.history.kept(run.id, frontier_step),
        )
    )


async def _newest(context: RunContext) -> tuple[trainer.Checkpoint | None, dict[str, int]]:
    response = await context.crew.leader.list_checkpoints()
    for checkpoint in response.checkpoints:
        ledger = read_ledger(checkpoint)
        ours = (ledger.get("store_id"), ledger.get("run")) == (context.kernel.state.store_id, context.run_id)
        if ours and not context.state.lineage.abandoned(checkpoint.version.number):
            return checkpoint, ledger
    return None, {}
