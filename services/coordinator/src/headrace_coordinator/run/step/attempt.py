"""One attempt at a step: from open slots to groups that are accumulated or dropped. Reads like its life."""

from __future__ import annotations

from headrace_coordinator.domain.devices.sharing import releases_to
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.learning import Learning, under_lease
from headrace_coordinator.run.step.moving.borrowing import Borrowing
from headrace_coordinator.run.step.moving.helping import Helping
from headrace_coordinator.run.step.pipeline import Pipeline
from headrace_coordinator.waits import WaitTimeout

TURN_LOOK_S = 1.0
"""No event tells that a turn on shared devices is over: this is how often it is looked at."""


class Attempt:
    """Generates and learns, at once or one after the other, as the placement says."""

    def __init__(self, pipeline: Pipeline, *, may_help: bool) -> None:
        """`may_help`: helpers may learn a part of it."""
        context = pipeline.context
        spec, placement = context.spec, context.placement
        # Deterministic runs accumulate in ordinal order, whatever settles first. An algorithm that learns from its
        # whole batch at the commit does its infer pass of each group as that comes.
        waits = spec.deterministic or spec.graph.whole_batch
        self._batched = waits or context.waits_for_batch
        self._streams = placement.streams and not waits
        self._joins = self._streams and placement.hybrid
        self._context = context
        self._ledger = context.state.ledger
        self._timer = pipeline.timer
        self._clock = context.event_log.monotonic
        self._pipeline = pipeline
        self._state = pipeline.begin(streams=self._streams)
        self._learning = Learning(self._state)
        self._helping = Helping(self._state, wanted=may_help and not self._batched)
        self._borrowing = Borrowing(self._state)
        self._sharing = Sharing(context)

    async def run(self) -> None:
        """Works until every group is accumulated or dropped. Raises `MessagesLost` or `AttemptLost`.

        1. Rollouts generate, reward instances score, and whole groups settle.
        2. The trainer group learns groups as they settle, or all of them once it has the devices; helpers learn beside.
        3. The helpers' gradients are added, and the trainer group learns what is left.
        """
        tail, helping, borrowing = self._context.tail, self._helping, self._borrowing
        if helping.wanted or borrowing.wanted:
            tail.begin(self._clock())
        if self._streams:
            await gather_all(self._generate(), self._learn(), helping.run())
        else:
            await gather_all(self._generate(), helping.run(), self._sharing.run(), borrowing.run())
            began = self._clock()
            await self._switch_to_trainers()
            tail.switched(self._clock() - began)
            await self._begin()
        tail.end(moved=helping.moved or borrowing.moved)
        await helping.contribute()
        if self._state.groups.collect() or not self._streams:
            await self._learning.run()
        devices = sum(len(worker.devices) for worker in self._context.workers.trainers)
        tail.learned(self._learning.seconds, self._learning.tokens, devices)
        await self._context.event_log.flush()
        if unsettled := self._ledger.unsettled():
            raise CallRefused("coordinator", "INTERNAL", f"groups {unsettled} were lost in the step")

    async def _generate(self) -> None:
        await self._pipeline.fill()
        self._state.complete()
        self._sharing.close()
        if self._joins and await self._pipeline.spent() and (self._state.groups.backlog or self._batched):
            await self._switch_to_trainers()
        self._state.groups.go_on()

    async def _learn(self) -> None:
        await self._borrowing.run()
        await self._begin()
        await self._learning.run()

    async def _switch_to_trainers(self) -> None:
        index = self._ledger.index
        # Rollouts that make answers of the next steps keep their devices.
        idle = not (self._state.ahead and (index.waiting or index.assigned))
        with self._timer.stage("switch"):
            await self._context.placement.hand_devices_to_trainers(complete=idle)

    async def _begin(self) -> None:
        """Opens the attempt at the trainer group, once what it begins with is durable."""
        ledger, lineage = self._ledger, self._context.state.lineage
        await self._context.event_log.flush()
        await self._context.snapshot_taken()
        leader = self._context.workers.leader
        await under_lease(
            self._context,
            lambda: leader.begin(ledger.step, ledger.attempt, lineage.head, lineage.last_number),
        )


class Sharing:
    """Gives devices to another run that shares them, while this run generates: when they idle, or its turn is over.

    The lease manager knows who waits for them, and `domain.devices.sharing` decides when this run gives way. Between
    two stages a run that shares holds no device anyway.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._index = context.state.ledger.index
        self._clock = context.event_log.monotonic
        self._over = False
        self._began = self._clock()
        self._turn: tuple[int, ...] = ()
        self._finished = 0
        spec = context.spec
        self._wanted = spec.placement.share
        # Episodes and conversations would begin anew elsewhere, and a deterministic run decodes in a fixed order: these
        # release devices only where nothing is in hand.
        self._in_parts = not spec.deterministic and context.modality.resumable

    def close(self) -> None:
        """Generation is over."""
        self._over = True
        self._context.event_log.wake()

    async def run(self) -> None:
        """Works until it is closed: releases the rollouts' devices whenever another run is due."""
        while self._wanted and not self._over:
            try:
                await self._context.event_log.wait_until(
                    lambda: self._over or self._due(), TURN_LOOK_S, "a run that shares the devices"
                )
            except WaitTimeout:
                continue
            if not self._over:
                await self._context.lending.release_to_other_run()

    def _due(self) -> bool:
        held = [worker for worker in self._context.workers.rollouts if worker.lease_epoch]
        if not held:
            return False
        self._note_turn(tuple(worker.lease_epoch for worker in held))
        devices = [device for worker in held for device in worker.devices]
        waiter = self._context.fleet.lease_manager.next_for(devices, self._context.run_id)
        if waiter is None:
            return False
        idle = not self._index.waiting and not self._index.assigned
        made = self._in_parts and self._done() > self._finished
        held_s = self._clock() - self._began
        return releases_to(waiter, self._context.state.priority, held_s, made=made, idle=idle)

    def _note_turn(self, epochs: tuple[int, ...]) -> None:
        if epochs != self._turn:
            self._turn, self._began, self._finished = epochs, self._clock(), self._done()

    def _done(self) -> int:
        """How many slots of the step need no device any more."""
        return len(self._context.state.ledger.slots) - self._index.waiting - self._index.assigned
