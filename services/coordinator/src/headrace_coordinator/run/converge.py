"""Brings the trainer group and the ledger to one version: keep it, record what was committed, or rewind.

The one path for a start, a lost trainer, a restarted coordinator and a resumed pause.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.sections.running import FromCheckpointSection
from headrace_schema.stores import is_remote
from headrace_servicekit.rpc.addresses import host_port
from headrace_servicekit.stores.problems import StoreProblem

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slot_index import ACCUMULATED
from headrace_coordinator.domain.ledger.versions import plan_lost_rewind
from headrace_coordinator.domain.run_states import RECOVERING
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.checkpointing import listed, lost_steps, read_ledger
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.generation import Generation
from headrace_coordinator.run.step.step import RunFailed, Step
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.uploads import fetch_origin
from headrace_coordinator.run.workers.clients import Published

MEETING_S = 60.0
"""How long ranks may take to meet: all of them have answered a moment ago."""
DAMAGED = "CHECKPOINT_DAMAGED"
AWAY = {DAMAGED, "NOT_FOUND"}
"""Reasons why a trainer cannot read one checkpoint of another run, which may delete it at any time: try the next."""
NOT_CARRIED = {"NOT_CARRIED", "CARRIED_MISMATCH"}
UNUSABLE = {*AWAY, "CHECKPOINT_MISMATCH", "INVALID"}
"""Reasons why a trainer refuses all checkpoints of another run."""


class Misplaced(Exception):
    """The run's checkpoints are not where they were; the message says what to do. The run pauses."""


async def form_trainer_group(context: RunContext) -> None:
    """All trainers form a group under a new generation; a trainer group of the same processes stays as it is."""
    trainers, run = context.workers.trainers, context.state
    states = await gather_all(*(each.step_state() for each in trainers))
    incarnations = [each.incarnation for each in trainers]
    same = run.trainer_group == incarnations and all(
        s.generation == run.trainer_group_generation for s in states
    )
    if same and run.trainer_group_generation:
        return
    generation = run.trainer_group_generation + 1
    formed = ev.TrainerGroupFormed(run=run.id, generation=generation, trainers=incarnations)
    await context.event_log.commit(formed)
    host = trainers[0].instance.address.rpartition(":")[0].strip("[]")
    # Port 0 lets rank 0 choose; with several ranks it must be known to all before they meet. Each run and
    # generation has its own, so that two groups on one host do not meet each other.
    port = 20000 + zlib.crc32(f"{run.id}/{generation}".encode()) % 10000 if len(trainers) > 1 else 0
    rendezvous = host_port(host, port)
    timeout = min(context.workers.fleet_timeout, MEETING_S)
    await gather_all(*(each.join(generation, len(trainers), rendezvous, timeout) for each in trainers))


async def converge(context: RunContext) -> Published:
    """The trainer holds the ledger's head, recorded and published; returns it. Raises `Misplaced`."""
    await settle_commit(context)
    if not await _holds_base(context):
        await _restore(context)
    base = context.state.lineage.base
    assert base is not None
    return await context.workers.leader.publish(base.number)


async def _holds_base(context: RunContext) -> bool:
    """Whether the trainer group has the ledger's head; restored here where its leader carried it from another group."""
    base, leader = context.state.lineage.base, context.workers.leader
    if base is None:
        return False
    state = await leader.step_state()
    if state_number(state) == base.number or state.carried_number != base.number:
        return state_number(state) == base.number
    try:
        layout = await leader.restore_carried(base.number)
    except CallRefused as refused:
        if refused.reason not in NOT_CARRIED:
            raise
        context.note(f"the state of the trainer group before is not used: {refused.message}")
        return False
    if layout and layout != context.state.layout:
        await context.event_log.commit(ev.LayoutChosen(run=context.run_id, layout=layout))
    return True


async def settle_commit(context: RunContext) -> None:
    """Records a commit that the trainer has made and the ledger does not know; closes any other attempt."""
    state = await context.workers.leader.step_state()
    if _committed_here(context, state):
        await _record_commit(context, state)
    elif state.phase == trainer.STEP_PHASE_ACCUMULATING:
        await context.workers.leader.abort(state.step, state.attempt)
    if context.state.ledger.open:
        await context.record_abort("the step was interrupted")


def state_number(state: trainer.GetStepStateResponse) -> int:
    """The version a trainer holds; 0 when it holds none that is usable."""
    return state.version.number if state.phase == trainer.STEP_PHASE_IDLE else 0


def _committed_here(context: RunContext, state: trainer.GetStepStateResponse) -> bool:
    """Whether the trainer has committed a version that the ledger has recorded, or knows everything of."""
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
        await context.workers.leader.recorded(state.step, state.attempt, number)
        return
    base = context.state.lineage.base
    assert base is not None
    opened = ev.StepOpened(
        run=context.run_id,
        step=state.step,
        attempt=state.attempt,
        base=base.number,
        number=number,
    )
    published = Published(state.version)
    generation = Generation(context, published, StepTimer(context.event_log.monotonic))
    await Step(generation).record(opened, state.commit)


async def _restore(context: RunContext) -> None:
    """Rewinds to the newest intact checkpoint of this run; begins with a fork's origin, or the initial model."""
    event_log, run = context.event_log, context.state
    away: dict[str, str] = {}
    while True:
        source = await _source(context, away)
        number = await _burn_number(context, source)
        try:
            response = await context.workers.leader.restore(
                source.name, number, event_log.state.store_id, source.directory
            )
            break
        except CallRefused as refused:
            if source.run and refused.reason in AWAY:
                away[source.name] = refused.message
            elif source.run and refused.reason in UNUSABLE:
                raise RunFailed(f"from_checkpoint: {refused.message}") from refused
            elif refused.reason != DAMAGED:
                raise
            # A damaged checkpoint of its own is renamed: the next listing leaves it out and reports it.
    for reason in away.values():
        context.note(f"from_checkpoint: {reason}")
    if "warmup_last_loss" in response.figures:
        context.note(_cloned(response.warmup_steps, response.figures), plain=True)
    for note in response.notes:
        context.note(note)
    if source.run:
        begun = f"forked from {source.run}, checkpoint {source.name}, step {source.frontier_step}"
        context.note(begun, plain=True)
    await event_log.commit(
        ev.VersionRestored(
            at=event_log.now(),
            run=run.id,
            number=number,
            parent=0 if source.run else source.number,
            ordinal=response.version.ordinal,
            digest=response.version.digest,
            checkpoint=source.name,
            frontier_step=source.frontier_step,
            frontier_prompt=source.ledger.get("frontier_prompt"),
            source_run=source.run,
            warmup_steps=response.warmup_steps,
            figures=dict(response.figures),
            layout=response.layout,
            kept=await event_log.history.kept(run.id, source.frontier_step),
            recovery=run.state == RECOVERING or source.frontier_step < run.ledger.step,
        )
    )


def _cloned(steps: int, figures: Mapping[str, float]) -> str:
    first, last = figures["warmup_first_loss"], figures["warmup_last_loss"]
    moments = f"{figures['warmup_moments']:,.0f} moments of demonstrations"
    return f"the policy imitated {moments} in {steps} supervised steps: loss {first:.4g}, then {last:.4g}"


@dataclass(frozen=True)
class _Source:
    """The checkpoint that a trainer restores; without a name: the initial model."""

    name: str = ""
    number: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)
    run: str = ""
    directory: str = ""

    @property
    def frontier_step(self) -> int:
        """Steps below this one are in the checkpoint."""
        step: int = self.ledger.get("frontier_step", 0)
        return step


async def _source(context: RunContext, away: dict[str, str]) -> _Source:
    """The newest usable checkpoint of this run, else a fork's origin, else the initial model.

    `away`: the origin's checkpoints that could not be read, and why.
    """
    run = context.state
    if own := await _newest(context):
        return own
    if run.last_checkpoint and (name := await context.uploads.fetch_newest()):
        context.note(f"the run's directory has no usable checkpoint: {name} was fetched from store.url")
        if own := await _newest(context):
            return own
    if run.last_checkpoint:
        raise Misplaced(
            f"checkpoint: version {run.last_checkpoint} was saved below {run.directory}/checkpoints, where no "
            "usable checkpoint is left; put the directory back and resume, or cancel and submit a new run"
        )
    if context.spec.from_checkpoint is not None:
        return await _origin(context, context.spec.from_checkpoint, away)
    return _Source()


async def _newest(context: RunContext) -> _Source | None:
    lineage = context.state.lineage
    response = await listed(context)
    for checkpoint in response.checkpoints:
        try:
            ledger = read_ledger(await context.workers.leader.fetch_ledger(checkpoint.name))
        except CallRefused as refused:
            if refused.reason != DAMAGED:
                raise
            return await _newest(context)  # The next listing has one less.
        ours = (ledger.get("store_id"), ledger.get("run")) == (
            context.event_log.state.store_id,
            context.run_id,
        )
        if ours and not lineage.abandoned(checkpoint.version.number):
            return _Source(checkpoint.name, checkpoint.version.number, ledger)
        if not ours:
            found = f"run {ledger['run']} of another store" if ledger.get("run") else "nothing readable"
            context.note(f"checkpoint {checkpoint.name} is not used: its ledger holds {found}")
    return None


async def _origin(context: RunContext, wanted: FromCheckpointSection, away: dict[str, str]) -> _Source:
    """The checkpoint of another run that this one begins with; raises `RunFailed` where there is none."""
    directory, name = str(Path(context.state.directory).parent / wanted.run), wanted.run
    if is_remote(wanted.run):
        directory, name = await _fetched_origin(context, wanted)
    found: list[int] = []
    for checkpoint in await _foreign(context, directory):
        if checkpoint.name in away or not _begins(context.state, checkpoint.name):
            continue
        try:
            ledger = read_ledger(await context.workers.leader.fetch_ledger(checkpoint.name, directory))
        except CallRefused as refused:
            if refused.reason not in AWAY:
                raise
            away[checkpoint.name] = refused.message
            continue
        step: int = ledger.get("frontier_step", 0)
        if ledger.get("run") == name and wanted.step in (None, step):
            if step >= context.spec.steps:  # The origin has gone on since this run was submitted.
                raise RunFailed(
                    f"steps: the checkpoint of {wanted.run} is of step {step}; set steps above it"
                )
            return _Source(checkpoint.name, checkpoint.version.number, ledger, name, directory)
        found.append(step)
    if begun_with := context.state.origin_checkpoint:
        raise RunFailed(
            f"from_checkpoint: run {wanted.run} no longer has checkpoint {begun_with}, with which this run began"
        )
    raise RunFailed(_none_left(wanted, found, away))


async def _fetched_origin(context: RunContext, wanted: FromCheckpointSection) -> tuple[str, str]:
    """The directory of checkpoints fetched from a store, and the run that made them. Raises `RunFailed`."""
    try:
        return await fetch_origin(
            wanted.run,
            Path(context.state.directory).parent,
            lambda name, step: _begins(context.state, name) and wanted.step in (None, step),
        )
    except StoreProblem as problem:
        raise RunFailed(f"from_checkpoint.run: {problem}") from problem


def _none_left(wanted: FromCheckpointSection, found: list[int], away: dict[str, str]) -> str:
    what = f"checkpoint of step {wanted.step}; it has {sorted(found)}" if found else "usable checkpoint"
    why = "".join(f"; {reason}" for reason in away.values())
    return f"from_checkpoint: run {wanted.run} has no {what}{why}"


def _begins(run: RunState, checkpoint: str) -> bool:
    """Whether a fork may begin with a checkpoint: one that has made steps begins again with the one that it had."""
    return run.ledger.step == run.ledger.first_step or checkpoint == run.origin_checkpoint


async def _foreign(context: RunContext, directory: str) -> Sequence[trainer.Checkpoint]:
    """Checkpoints of another run; raises `RunFailed` where its directory cannot be used."""
    try:
        response = await context.workers.leader.list_checkpoints(directory)
    except CallRefused as refused:
        if refused.reason not in UNUSABLE:
            raise
        raise RunFailed(f"from_checkpoint: {refused.message}") from refused
    for damaged in response.set_aside:
        context.note(f"from_checkpoint: {damaged.name} is damaged: {damaged.reason}")
    return response.checkpoints


async def _burn_number(context: RunContext, source: _Source) -> int:
    """A version number above any that the log or the checkpoint knows; appends steps that a lost log end held."""
    event_log, run, ledger = context.event_log, context.state, source.ledger
    if source.run:
        ledger = {}
    if ledger and (steps := await lost_steps(event_log, run.id, source.number, ledger)):
        for step in steps:
            await event_log.commit(*plan_lost_rewind(run.lineage, step), step)
        first, last = steps[0].certificate, steps[-1].certificate
        context.note(
            f"the store had lost steps {first.ordinal} to {last.ordinal}: {len(steps)} of them are known again from "
            f"checkpoint {source.name} and the run's history"
        )
    if ledger.get("coordinator_epoch", 0) > event_log.state.epoch:
        await event_log.raise_epoch(ledger["coordinator_epoch"])
    number = max(run.lineage.last_number, int(ledger.get("last_number", 0))) + 1
    await event_log.commit(ev.NumberBurnt(run=run.id, number=number))
    return number
