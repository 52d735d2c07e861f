"""Fills the slots of open steps: one stream of work a rollout, until every group is settled or dropped.

Opens and ends the streams, and brings new versions to the rollouts meanwhile. `dispatch` hands work out, `receiving`
takes what comes back. Knows no trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from headrace.rollout.v1 import rollout_pb2 as rollout

from headrace_coordinator.domain.ledger.slot_index import Slot
from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.modality import Sampling, distribution_of
from headrace_coordinator.run.step.dispatch import Dispatch
from headrace_coordinator.run.step.receiving import Receiver
from headrace_coordinator.run.step.scoring.rewards import Rewards
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import Trajectories
from headrace_coordinator.run.step.videos import write_videos
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import Opening, Produced, RolloutClient

LOOK_S = 5.0
TRAINER_BEHIND = "the trainer to take answers: limits.in_flight_bytes of them wait for it"
SHOWN_S = 2.0
LONG_S = 86_400.0
"""Deadline of a stream that serves many steps: that each of them makes progress is watched for itself."""


class Generation:
    """A stretch of generation: for an attempt at one step; with `max_staleness`, for all steps until a boundary."""

    def __init__(self, context: RunContext, published: Published, timer: StepTimer) -> None:
        """`published`: the newest version, which the rollouts have installed."""
        self.context = context
        self.timer = timer
        self.published = published
        self.trajectories = Trajectories(context.spec.limits.in_flight_bytes)
        self._workers = context.workers
        self._clock = context.event_log.monotonic
        self._ahead = context.spec.algorithm.max_staleness > 0
        self._task: asyncio.Task[Any] | None = None
        self._newer = asyncio.Event()
        self._begun = False
        self._attempt: AttemptState
        self._rewards: Rewards
        self._dispatch: Dispatch
        self._receiver: Receiver
        self._idle_since: dict[str, float] = {}
        self._since: dict[str, float] = {}
        """From when on the time of an open stream is not counted yet, by incarnation."""
        self._overs: dict[str, asyncio.Event] = {}
        self._held_back: set[str] = set()
        """Rollouts that get no stream, since they are about to install a version."""

    @property
    def goes_on(self) -> bool:
        """Whether answers are being made, of the next steps too."""
        return self._task is not None

    def begin(self) -> AttemptState:
        """An attempt at a step begins: what generation and learning share from now on."""
        if self.goes_on:
            self._attempt.groups.begin()
            return self._attempt
        self._attempt = attempt = AttemptState(self.context, self.timer, self.published, self.trajectories)
        self._rewards = Rewards(attempt)
        self._dispatch = Dispatch(attempt)
        self._receiver = Receiver(attempt, self._dispatch, self._rewards)
        self._held_back.clear()
        self._begun = True
        return attempt

    async def fill(self) -> None:
        """Works until every group of the step that is learned is settled or dropped, and all streams have ended.

        Where answers are made ahead, that goes on; what ends it is raised here, at once or for the next step.
        """
        if not self._ahead:
            await gather_all(self._rewards.scoring.run(), self._generate_all())
            return
        if self._task is None:
            parts = self._rewards.scoring.run(), self._generate_all(), self._install_newer()
            self._task = asyncio.ensure_future(gather_all(*parts))
        closed = asyncio.ensure_future(self._attempt.groups.closed.wait())
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
        index, groups, work = self._attempt.ledger.index, self._attempt.groups, self._attempt.work
        while self._ahead and (index.waiting or index.assigned):
            if groups.exhausted and not groups.sent:
                return False
            await asyncio.wait({work.next(), groups.changed.next()}, return_when=asyncio.FIRST_COMPLETED)
        return True

    def install(self, published: Published) -> None:
        """Has the rollouts take a newer version, beside all else; of several the newest."""
        if self._begun:
            self.published = self._attempt.published = published
            self._newer.set()

    def step_ended(self, slots: Iterable[Slot]) -> None:
        """The slots of the step are terminal: removes what is kept of them."""
        if not self._begun:
            return
        keys = [slot.key for slot in slots]
        self._dispatch.forget(keys)
        self._rewards.forget({prompt for prompt, _ in keys})
        self.trajectories.forget(keys)

    def count_time(self) -> None:
        """Counts what open streams have worked so far: a step's times are about to be recorded."""
        now = self._clock()
        for worker in self._workers.producers if self.goes_on else ():
            if (since := self._since.get(worker.incarnation)) is not None:
                self.timer.add("generate", (since, now), worker.devices)
                self._since[worker.incarnation] = now
            if (since := self._idle_since.get(worker.incarnation)) is not None:
                self.timer.rested((since, now), worker.devices)
                self._idle_since[worker.incarnation] = now

    async def stop(self) -> None:
        """Ends generation; what was in hand is made again. No answer is being made at any rollout then."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task, self._begun = None, False
        alive = [each for each in self._workers.producers if self.context.fleet.alive(each.incarnation)]
        await asyncio.gather(*(self._abort(worker) for worker in alive))

    async def _generate_all(self) -> None:
        self._attempt.refill()  # A coordinator that stopped may not have come to it.
        await self._receiver.adopt_finished()
        index, streams = self._attempt.ledger.index, dict[str, asyncio.Task[None]]()
        try:
            while self._attempt.generates:
                news = self._attempt.work.next()
                self._attempt.open_ahead()
                self._open_streams(streams)
                if not streams and index.waiting and not self._devices_come_back:
                    await self.context.devices.add_rollout(self._attempt.published)
                    continue
                futures: set[asyncio.Future[None]] = {news, *streams.values()}
                await asyncio.wait(futures, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self._cancel_streams_of_lost_instances(streams)
                for incarnation in [key for key, task in streams.items() if task.done()]:
                    streams.pop(incarnation).result()
            self._rewards.scoring.close()
            await asyncio.gather(*streams.values())
        finally:
            self._rewards.scoring.close()
            for task in streams.values():
                task.cancel()
            await asyncio.gather(*streams.values(), return_exceptions=True)

    @property
    def _devices_come_back(self) -> bool:
        """Whether the rollouts get devices or streams again with the version that is installed next."""
        return bool(self._held_back) or (self._attempt.ahead > 0 and self.context.leases.joined)

    def _open_streams(self, streams: dict[str, asyncio.Task[None]]) -> None:
        if self._attempt.ledger.index.waiting:
            for worker in (*self._workers.decoding, *self._workers.decoders):
                known = streams.keys() | self._held_back
                if self._workers.usable(worker) and worker.incarnation not in known:
                    streams[worker.incarnation] = asyncio.ensure_future(self._stream(worker))

    def _cancel_streams_of_lost_instances(self, streams: dict[str, asyncio.Task[None]]) -> None:
        """A stream to an instance without a session may hang for long: it is not waited for."""
        for incarnation in [key for key in streams if not self._workers.fleet.alive(key)]:
            streams.pop(incarnation).cancel()

    async def _stream(self, worker: RolloutClient) -> None:
        """One stream, from its opening to its end, however it ends."""
        why = "its stream of work ended early"
        over, revoked = asyncio.Event(), False
        self._since[worker.incarnation], self._overs[worker.incarnation] = self._clock(), over
        await self.context.modality.prepare(worker)
        assignments = self._work(worker, self._dispatch.assignments(worker, over.is_set))
        try:
            limit = LONG_S if self._attempt.ahead else self.context.spec.limits.step_timeout_s
            async for response in worker.generate(self._opening(worker), assignments, limit):
                await self._take(worker, response, over)
                if not self._attempt.ledger.index.held.get(worker.incarnation):
                    self._idle_since.setdefault(worker.incarnation, self._clock())
                revoked = response.revoked
            self.context.modality.ended(worker, well=True)
            if revoked:
                worker.lost_lease()
            elif over.is_set():
                found = await self.context.modality.recover(worker)
                if not found and worker.incarnation not in self._held_back:
                    await self.context.lost(worker, "its work was stopped from outside")
        except InstanceDown as fault:
            why = str(fault)
            await self.context.lost(worker, why)
        except CallRefused as refused:
            if revoked := self._workers.lease_ended(worker, refused):
                worker.lost_lease()
            elif refused.reason == "LEASE_QUIESCED":
                why = "its lease was not renewed in time"
                await self._workers.wait_for_renewal(worker)
            else:
                raise
        finally:
            # However a stream ends, samples that it did not finish are made again, and not handed to it once more:
            # gRPC still reads `assignments` when the stream is broken.
            over.set()
            self.context.modality.ended(worker, well=False)
            lost = self._dispatch.take_back_from(worker)
            if lost and not revoked:
                self.context.note(f"{lost} samples of {worker.instance.instance} are made again: {why}")
            self._end_idle(worker)
            self.timer.add("generate", (self._since.pop(worker.incarnation), self._clock()), worker.devices)
            self._overs.pop(worker.incarnation)
            self._attempt.work.beat()

    async def _work(
        self, worker: RolloutClient, assignments: AsyncIterator[rollout.AssignGroups]
    ) -> AsyncIterator[rollout.AssignGroups]:
        async for message in assignments:
            self._end_idle(worker)
            yield message

    async def _take(self, worker: RolloutClient, response: Produced, over: asyncio.Event) -> None:
        """Takes one response; sets `over` where its stream is to get no more work."""
        self._time_stages(worker, response)  # Before anything is waited for: its times count back from now.
        if isinstance(response, rollout.GenerateResponse):
            self._time_prefills(worker, response)
            if response.sessions:
                self.context.fleet.online[self.context.run_id].end(response.sessions)
        if self.context.modality.takes_losses(worker, response):
            over.set()
        # First: the step's streams are cancelled once its last episode is taken.
        if isinstance(response, rollout.RunEpisodesResponse) and response.videos:
            await write_videos(self.context, self._attempt.ledger.step_of, response)
        if messages := [chunk.finished for chunk in response.chunks if chunk.HasField("finished")]:
            if self._attempt.trajectories.full:
                with self.context.fleet.waits.named(self.context.run_id, TRAINER_BEHIND, after=SHOWN_S):
                    while self._attempt.trajectories.full and self._attempt.draining:
                        await self._attempt.trajectories.released()
            await self._receiver.take_finished(messages)
        if response.partials or response.revoked:
            over.set()
            self._receiver.take_partials(worker, response.partials)

    def _opening(self, worker: RolloutClient) -> Opening:
        """The first message of a worker's stream, which says what it makes; the client fills in the header."""
        spec = self.context.spec
        sampling = Sampling(
            policy_number=worker.installed,
            seed=spec.seed,
            distribution=distribution_of(spec.sampling, spec.sampling.temperature),
            max_new_tokens=spec.sampling.longest_at(self._attempt.ledger.step),
            stop=spec.sampling.stop,
            chunk_tokens=spec.rollout.chunk_tokens,
        )
        return self.context.modality.opening(worker, sampling)

    # --- times

    def _time_stages(self, worker: RolloutClient, response: Produced) -> None:
        """Policy and environments take turns within generate. The environments' time is on no device of the run."""
        now = self._clock()
        for metrics in response.stages:
            seconds = metrics.wall_time.ToNanoseconds() / 1e9
            devices = () if metrics.stage == "simulate" else worker.devices
            if seconds or metrics.stage == "simulate":
                self.timer.add(metrics.stage, (now - seconds, now), devices)
            for name, value in metrics.values.items():
                self.timer.figures[name] += value

    def _time_prefills(self, worker: RolloutClient, response: rollout.GenerateResponse) -> None:
        """Prompts are computed within generate, where the engine tells it apart."""
        now = self._clock()
        for prefill in response.prefills:
            began = now - prefill.began_ago.ToNanoseconds() / 1e9
            lasted = prefill.lasted.ToNanoseconds() / 1e9
            self.timer.add("prefill", (began, min(now, began + lasted)), worker.devices)

    def _end_idle(self, worker: RolloutClient) -> None:
        """Counts the time since the worker's last answer: it has work again, or its stream has ended."""
        if (since := self._idle_since.pop(worker.incarnation, None)) is not None:
            self.timer.rested((since, self._clock()), worker.devices)

    # --- new versions

    async def _install_newer(self) -> None:
        while True:
            await self._newer.wait()
            self._newer.clear()
            began = self._clock()
            await self._bring(self.published)
            # A step may have ended meanwhile.
            self.timer.add("sync", (max(began, self.timer.started), self._clock()))
            self._attempt.work.beat()  # Rollouts have credit for another step.

    async def _bring(self, published: Published) -> None:
        """The rollouts take a version as the spec says; one that refuses an install in flight stops its answers."""
        how = self.context.spec.install
        if how == "in_flight":
            try:
                return await self.context.devices.add_rollout(published, in_flight=True)
            except (CallRefused, InstanceDown) as fault:
                self.context.note(f"version {published.version.number} was not installed in flight: {fault}")
                if isinstance(fault, InstanceDown):
                    await self.context.fleet.fate(fault.incarnation)
        await self._install_between(published, abort=how != "drain")

    async def _install_between(self, published: Published, *, abort: bool) -> None:
        """Installs where no answer is being made: those in hand end before it, or go on after it.

        The weights come while answers are still made: what stands still waits for the swap alone.
        """
        number = published.version.number
        behind = [w for w in self._workers.rollouts if not w.awake or w.installed != number]
        await self.context.leases.prefetch(behind, published)
        try:
            await self._hold_back(behind, abort=abort)
            await self.context.devices.add_rollout(published)
        finally:
            self._held_back.clear()
            self._attempt.work.beat()

    async def _hold_back(self, workers: Iterable[RolloutClient], *, abort: bool) -> None:
        """Ends the streams of some rollouts, which get no other while they are held back: their answers end first.

        `abort`: they stop, and go on later from what they have.
        """
        held = {worker.incarnation: worker for worker in workers}
        self._held_back |= held.keys()
        for incarnation, worker in held.items():
            if over := self._overs.get(incarnation):
                over.set()
                if abort:
                    await self._abort(worker)
        self._attempt.work.beat()
        while any(incarnation in self._since for incarnation in held):
            await asyncio.shield(self._attempt.work.next())

    async def _abort(self, worker: RolloutClient) -> None:
        try:
            await worker.abort()
        except (InstanceDown, CallRefused) as fault:
            self.context.note(f"{worker.instance.instance} did not stop its answers: {fault}")
