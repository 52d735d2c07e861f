"""One attempt at a step: from open slots to groups that are accumulated or dropped. Reads like its life."""

from __future__ import annotations

from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.generation import Generation
from headrace_coordinator.run.step.learning import Learning, under_lease
from headrace_coordinator.run.step.moving.borrowing import Borrowing
from headrace_coordinator.run.step.moving.helping import Helping
from headrace_coordinator.run.step.moving.sharing import Sharing
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import Trajectories
from headrace_coordinator.run.workers.clients import Published


class Attempt:
    """Generates and learns, at once or one after the other, as the placement says."""

    def __init__(
        self,
        context: RunContext,
        timer: StepTimer,
        published: Published,
        trajectories: Trajectories,
        *,
        may_help: bool,
    ) -> None:
        """`may_help`: helpers may learn a part of it."""
        spec, placement = context.spec, context.placement
        # Deterministic runs accumulate in ordinal order, whatever settles first. An algorithm that learns from its
        # whole batch at the commit does its infer pass of each group as that comes.
        waits = spec.deterministic or spec.graph.whole_batch
        self._batched = waits or context.waits_for_batch
        self._streams = placement.streams and not waits
        self._joins = self._streams and placement.hybrid
        self._context = context
        self._ledger = context.state.ledger
        self._timer = timer
        self._clock = context.event_log.monotonic
        self._state = AttemptState(context, timer, published, trajectories, streams=self._streams)
        self._generation = Generation(self._state)
        self._learning = Learning(self._state)
        self._helping = Helping(self._state, wanted=may_help and not self._batched)
        self._borrowing = Borrowing(self._state)
        self._sharing = Sharing(context)

    async def run(self) -> None:
        """Works until every group is accumulated or dropped. Raises `MessagesLost` or `AttemptLost`."""
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
        await self._generation.run()
        self._state.complete()
        self._sharing.close()
        if self._joins and (self._state.groups.backlog or self._batched):
            await self._switch_to_trainers()
        self._state.groups.go_on()

    async def _learn(self) -> None:
        await self._borrowing.run()
        await self._begin()
        await self._learning.run()

    async def _switch_to_trainers(self) -> None:
        with self._timer.stage("switch"):
            await self._context.placement.hand_devices_to_trainers(complete=True)

    async def _begin(self) -> None:
        """Opens the attempt at the trainer group, once what it begins with is durable."""
        ledger, lineage = self._ledger, self._context.state.lineage
        await self._context.event_log.flush()
        leader = self._context.workers.leader
        await under_lease(
            self._context,
            lambda: leader.begin(ledger.step, ledger.attempt, lineage.head, lineage.last_number),
        )
