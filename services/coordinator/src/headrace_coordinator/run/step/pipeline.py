"""Generation beside learning: for one attempt at one step, or ahead of the step that is learned until a boundary.

Owns the streams of work and brings new versions to the rollouts meanwhile. Knows no trainer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from headrace_coordinator.domain.ledger.slot_index import Slot
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.generation import Generation
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import Trajectories
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import RolloutClient


class Pipeline:
    """One stretch of generation. With `max_staleness: 0` it makes the answers of one attempt at a step."""

    def __init__(self, context: RunContext, published: Published, timer: StepTimer) -> None:
        """`published`: the newest version, which the rollouts have installed."""
        self.context = context
        self.timer = timer
        self.published = published
        self.trajectories = Trajectories(context.spec.limits.in_flight_bytes)
        self._ahead = context.spec.algorithm.max_staleness > 0
        self._state: AttemptState | None = None
        self._generation: Generation | None = None
        self._task: asyncio.Task[Any] | None = None
        self._newer = asyncio.Event()

    @property
    def goes_on(self) -> bool:
        """Whether answers are being made, of the next steps too."""
        return self._task is not None

    def begin(self, *, streams: bool) -> AttemptState:
        """An attempt at a step begins: what generation and learning share from now on.

        `streams`: groups are learned while others are generated.
        """
        if self.goes_on and self._state is not None:
            self._state.groups.begin()
            return self._state
        self._state = AttemptState(
            self.context, self.timer, self.published, self.trajectories, streams=streams
        )
        self._generation = Generation(self._state)
        return self._state

    async def fill(self) -> None:
        """Works until every group of the step that is learned is settled or dropped.

        Where answers are made ahead, that goes on; what ends it is raised here, at once or for the next step.
        """
        assert self._state is not None and self._generation is not None
        if not self._ahead:
            return await self._generation.run()
        if self._task is None:
            self._task = asyncio.ensure_future(gather_all(self._generation.run(), self._install_newer()))
        closed = asyncio.ensure_future(self._state.groups.closed.wait())
        try:
            await asyncio.wait({self._task, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        if self._task.done():
            self._task.result()

    async def spent(self) -> bool:
        """Whether the rollouts have nothing left to do before the step is learned.

        Where answers are made ahead, waits until they have used up their credit, or the step is learned.
        """
        assert self._state is not None
        index, groups, work = self._state.ledger.index, self._state.groups, self._state.work
        while self._ahead and (index.waiting or index.assigned):
            if groups.exhausted and not groups.sent:
                return False
            await asyncio.wait({work.next(), groups.changed.next()}, return_when=asyncio.FIRST_COMPLETED)
        return True

    def install(self, published: Published) -> None:
        """Has the rollouts take a newer version, beside all else; of several the newest."""
        if self._state is not None:
            self.published = self._state.published = published
            self._newer.set()

    def step_ended(self, slots: list[Slot]) -> None:
        """The slots of the step are terminal: removes what is kept of them."""
        if self._generation is not None:
            self._generation.forget(slots)

    def count_time(self) -> None:
        """Counts what open streams have worked so far: a step's times are about to be recorded."""
        if self.goes_on and self._generation is not None:
            self._generation.count_time()

    async def stop(self) -> None:
        """Ends generation; what was in hand is made again. No answer is being made at any rollout then."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = self._state = self._generation = None
        await asyncio.gather(*(self._abort(worker) for worker in self.context.workers.producers))

    async def _abort(self, worker: RolloutClient) -> None:
        try:
            if self.context.fleet.alive(worker.incarnation):
                await worker.abort()
        except (InstanceDown, CallRefused) as fault:
            self.context.note(f"ignored while stopping: {fault}")

    # --- new versions

    async def _install_newer(self) -> None:
        while True:
            await self._newer.wait()
            self._newer.clear()
            clock = self.context.event_log.monotonic
            began = clock()
            await self._bring(self.published)
            self.timer.add(
                "sync", (max(began, self.timer.started), clock())
            )  # A step may have ended meanwhile.
            assert self._state is not None
            self._state.work.beat()  # Rollouts have credit for another step.

    async def _bring(self, published: Published) -> None:
        """The rollouts take a version as the spec says; one that refuses an install in flight stops its answers."""
        how = self.context.spec.install
        if how == "in_flight":
            try:
                return await self.context.placement.add_rollout(published, in_flight=True)
            except (CallRefused, InstanceDown) as fault:
                self.context.note(f"version {published.version.number} was not installed in flight: {fault}")
                if isinstance(fault, InstanceDown):
                    await self.context.fleet.fate(fault.incarnation)
        await self._install_between(published, abort=how != "drain")

    async def _install_between(self, published: Published, *, abort: bool) -> None:
        """Installs where no answer is being made: those in hand end before it, or go on after it.

        The weights come while answers are still made: what stands still waits for the swap alone.
        """
        assert self._generation is not None
        number = published.version.number
        behind = [w for w in self.context.workers.rollouts if not w.awake or w.installed != number]
        await self.context.leases.prefetch(behind, published)
        try:
            await self._generation.hold_back(behind, abort=abort)
            await self.context.placement.add_rollout(published)
        finally:
            self._generation.go_on()
