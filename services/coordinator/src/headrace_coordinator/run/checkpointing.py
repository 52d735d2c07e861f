"""When to make a checkpoint, and what the coordinator's ledger in it says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Container, Iterable
from pathlib import PurePath
from typing import Any

from headrace.trainer.v1 import trainer_pb2 as trainer

from headrace_coordinator.domain import events as ev
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.run_files import RunFiles

STEPS_BYTES = 16 << 20
"""Most bytes of the steps that a checkpoint's ledger repeats, before compression."""

LEAST_COST_S = 0.25
"""Least cost of a checkpoint, however fast it was made: by default they are at least five seconds apart. A killed
trainer repeats what came after the last one, so this bounds what a kill costs a run of short steps."""


async def ledger_of(event_log: EventLog, run_id: str) -> bytes:
    """Highest numbers, the frontier, steps since the oldest kept checkpoint: what a log that lost its end lacks."""
    run = event_log.state.runs[run_id]
    head = run.lineage.base
    ledger = {
        "store_id": event_log.state.store_id,
        "run": run_id,
        "coordinator_epoch": event_log.state.epoch,
        "last_number": run.lineage.last_number,
        "last_attempt": run.ledger.last_attempt,
        "frontier_step": run.ledger.step,
        "frontier_prompt": run.ledger.next_prompt,
        "version": head.number if head else 0,
    }
    since = run.checkpoints[0][1] if run.checkpoints else 0
    steps = await event_log.history.read(run_id, lambda files: _packed(files.steps_from(since)))
    return json.dumps(ledger | {"steps": steps}).encode()


async def wanted_by_others(event_log: EventLog, run_id: str) -> list[str]:
    """Names of the run's checkpoints that must not be deleted.

    Those that evaluations use, that forks without a checkpoint of their own begin with, and the newest that the ledger
    knows: they may be asked for while the next one is written.
    """
    names, steps = {name for name, _ in event_log.state.runs[run_id].checkpoints}, set[int]()
    for fork in event_log.state.active_runs():
        if fork.evaluation is not None and fork.evaluation.checkpoint_run == run_id:
            found = PurePath(fork.evaluation.checkpoint_directory)
            own = PurePath(event_log.state.runs[run_id].directory, "checkpoints")
            names |= {found.relative_to(own).as_posix()}
        origin = fork.spec.get("from_checkpoint") or {}
        if origin.get("run") != run_id or fork.last_checkpoint:
            continue
        names |= {fork.origin_checkpoint} - {""}
        steps |= {origin["step"]} - {None}
    if steps:
        names |= await event_log.history.read(run_id, lambda files: files.checkpoints_of(steps))
    return sorted(names)


def _packed(steps: Iterable[ev.StepCommitted | ev.StepSkipped]) -> str:
    """Steps, newest first, as text: JSON lines, compressed; the oldest are left out when they are too many."""
    lines: list[bytes] = []
    room = STEPS_BYTES
    for step in steps:
        line = ev.encode(step)
        room -= len(line)
        if room < 0:
            break
        lines.append(line)
    return base64.b64encode(zlib.compress(b"\n".join(reversed(lines)))).decode()


def read_ledger(data: bytes) -> dict[str, Any]:
    """The ledger of a checkpoint; empty when it is not one of ours."""
    try:
        ledger = json.loads(data)
    except ValueError:
        return {}
    return ledger if isinstance(ledger, dict) else {}


def missing_steps(ledger: dict[str, Any], known: Container[int]) -> list[ev.StepCommitted]:
    """Committed steps that a checkpoint knows and the log does not."""
    if "steps" not in ledger:
        return []
    events = map(ev.decode, zlib.decompress(base64.b64decode(ledger["steps"])).splitlines())
    return [e for e in events if isinstance(e, ev.StepCommitted) and e.certificate.number not in known]


async def lost_steps(
    event_log: EventLog, run_id: str, version: int, ledger: dict[str, Any]
) -> list[ev.StepCommitted]:
    """The steps that made `version` of a checkpoint and that the log does not know, oldest first.

    The newest from the checkpoint's ledger; those before them from what the history set aside, as far as it goes.
    """
    newest = event_log.state.runs[run_id].lineage.newest
    steps = missing_steps(ledger, range(newest + 1))
    if version <= newest:
        return steps

    def look(files: RunFiles) -> dict[int, ev.Event]:
        made: dict[int, ev.Event] = {}
        for event in files.set_aside():
            if isinstance(event, ev.StepCommitted):
                made[event.certificate.number] = event
            elif isinstance(event, ev.VersionRestored):
                made[event.number] = event
        return made

    aside = await event_log.history.read(run_id, look)
    number = steps[0].certificate.parent if steps else version
    while number > newest and (event := aside.get(number)) is not None:
        if isinstance(event, ev.StepCommitted):
            steps.insert(0, event)
            number = event.certificate.parent
        elif isinstance(event, ev.VersionRestored):
            number = event.parent
    return steps


async def listed(context: RunContext) -> trainer.ListCheckpointsResponse:
    """Checkpoints of the run; appends an event for each that was found damaged since the last listing."""
    response = await context.workers.leader.list_checkpoints()
    for damaged in response.set_aside:
        reason = f"{damaged.reason}; now {damaged.set_aside_as}" if damaged.set_aside_as else damaged.reason
        context.event_log.post(ev.CheckpointSetAside(run=context.run_id, name=damaged.name, reason=reason))
    return response


class Checkpointer:
    """Starts checkpoints as the spec says: the time that saving takes stays below a share of wall time."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._last_at = context.event_log.monotonic()
        self._cost_s = 0.0
        self._announced = context.state.last_checkpoint
        self._in_flight, self._name, self._step = 0, "", 0
        self._began_at = self._ordinal
        """Ordinal of the version that was saved last, or that this began with."""
        self.last_failure = ""

    def due(self) -> bool:
        """Whether a checkpoint should start now."""
        section, run = self._context.spec.checkpoint, self._context.state
        if not section.enabled or run.lineage.base is None:
            return False
        if self._in_flight or run.lineage.head == self._announced:
            return False
        if section.interval_steps:
            # A checkpoint that was skipped, because the one before was being written, is made at the next step.
            every = section.interval_steps
            return self._ordinal % every == 0 or self._ordinal // every > self._began_at // every
        waited = self._context.event_log.monotonic() - self._last_at
        return waited >= section.max_interval_s or waited * section.time_budget >= max(
            self._cost_s, LEAST_COST_S
        )

    @property
    def _ordinal(self) -> int:
        """Ordinal of the version that steps begin with."""
        base = self._context.state.lineage.base
        return base.ordinal if base else 0

    def begin(self, timer: StepTimer) -> None:
        """Starts a checkpoint of the head beside other work; the trainer begins no step before it has its copy."""

        async def save() -> None:
            with timer.stage("checkpoint"):
                await self.save(wait=False)

        self._context.snapshot = asyncio.ensure_future(save())

    @contextlib.asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Nothing that `begin` started goes on afterwards."""
        try:
            yield
        finally:
            if (snapshot := self._context.snapshot) is not None:
                snapshot.cancel()
                await asyncio.gather(snapshot, return_exceptions=True)
                self._context.snapshot = None

    async def save(self, wait: bool) -> None:
        """Starts a checkpoint of the head; with `wait`, until it is durable. After a failure the run goes on."""
        context, number = self._context, self._context.state.lineage.head
        self._began_at = self._ordinal
        started, step = context.event_log.monotonic(), context.state.ledger.step
        try:
            ledger = await ledger_of(context.event_log, context.run_id)
            retained = await wanted_by_others(context.event_log, context.run_id)
            retained += [*context.recording.bases(), *context.uploads.names]
            if context.spec.is_session:
                journal = context.fleet.desks.of(context.run_id, context.state.directory).journal
                retained += [each["checkpoint"] for each in journal.named.values()]
            response = await context.workers.leader.save(number, ledger, wait, retained)
        except CallRefused as refused:
            self._failed(refused.message)
            return
        # A save that waits takes its turn, so the one before is written by now. This save does not depend on that.
        with contextlib.suppress(CallRefused, InstanceDown):
            await self.announce()
        self._cost_s = max(
            context.event_log.monotonic() - started, response.snapshot_time.ToNanoseconds() / 1e9
        )
        self._last_at = context.event_log.monotonic()
        self._in_flight, self._name, self._step = number, response.checkpoint.name, step
        if response.durable:
            self._saved(response.checkpoint.name, number)

    async def announce(self) -> None:
        """Appends an event for a checkpoint that became durable, or failed, in the background."""
        if not self._in_flight:
            return
        if self._context.state.lineage.abandoned(self._in_flight):
            self._in_flight = 0  # A rewind abandoned its version.
            return
        response = await listed(self._context)
        if any(checkpoint.version.number == self._in_flight for checkpoint in response.checkpoints):
            self._saved(self._name, self._in_flight)
        elif response.last_failure:
            self._failed(response.last_failure)
        elif any(damaged.name == self._name for damaged in response.set_aside):
            self._failed(f"{self._name} was damaged as soon as it was written")

    def _saved(self, name: str, number: int) -> None:
        self._announced, self._in_flight = number, 0
        context = self._context
        context.recording.saved(name, number, self._step)
        if context.state.last_checkpoint == number:
            return
        context.uploads.saved(name, number, self._step)
        context.event_log.post(
            ev.CheckpointSaved(run=context.run_id, name=name, number=number, step=self._step)
        )

    def _failed(self, reason: str) -> None:
        self._last_at, self._in_flight = self._context.event_log.monotonic(), 0
        if reason != self.last_failure:
            self.last_failure = reason
            context = self._context
            context.event_log.post(ev.CheckpointFailed(run=context.run_id, reason=reason))
