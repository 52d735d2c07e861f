"""Fills the open step's slots: one Generate stream a rollout, until every group is settled or dropped.

Says only which streams are open: `dispatch` gives work out, `receive` takes what comes, `settle` ends groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout

from headrace_coordinator.fleet.instance_client import CallRefused, InstanceDown
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.dispatch import Dispatch
from headrace_coordinator.run.step.receiving import Receive
from headrace_coordinator.run.step.scoring.rewards import ScoreStages
from headrace_coordinator.run.step.scoring.scoring import Scoring
from headrace_coordinator.run.step.state import Batch, Settle
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.trajectories import Relay
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import Produced, RolloutClient
from headrace_coordinator.waits import Notifier

LOOK_S = 5.0
TRAINER_BEHIND = "the trainer to take answers: limits.in_flight_bytes of them wait for it"
SHOWN_S = 2.0
OWN_TURN = "own turn"
"""Time in which the policy answers, where another one replies on devices of its own: no stage has a space in it."""


class Generation:
    """One step attempt's way from slots to settled groups."""

    def __init__(
        self,
        context: RunContext,
        relay: Relay,
        timer: StepTimer,
        published: Published,
        on_settled: Callable[[int], None],
        on_complete: Callable[[], None],
        draining: Callable[[], bool],
        joining: Callable[[], Sequence[RolloutClient]],
    ) -> None:
        self._context = context
        self._workers = context.workers
        self._index = context.state.ledger.index
        self._relay = relay
        self._timer = timer
        self._published = published
        self._draining = draining
        self._news = Notifier()
        self.batch = Batch()
        self._rests_since: dict[str, float] = {}
        self._dispatch = Dispatch(context, published, self._news, joining)
        self._settle = Settle(context, relay, self.batch, self._news, on_settled, on_complete)
        self._scoring, put = self._score_stages(timer)
        self._receive = Receive(
            context, relay, published, self.batch, self._news, self._dispatch, put, self._settle
        )

    def _score_stages(self, timer: StepTimer) -> tuple[Scoring, Callable[[reward.ScoreItem], None]]:
        """The workflow's reward stages, and where finished answers enter them."""
        spec, settle = self._context.spec, self._settle
        if not spec.reward.stages:
            scoring = Scoring(self._context.staffing, timer, settle.take_scores, spec.main_stage)
            return scoring, scoring.put
        scoring = Scoring(
            self._context.staffing, timer, lambda results: stages.take(results), spec.main_stage
        )
        stages = ScoreStages(self._context, self.batch, scoring.put, settle.take_scores)
        return scoring, stages.put

    def look(self) -> None:
        """There may be another rollout to give work to."""
        self._news.beat()

    async def run(self) -> None:
        """Until every group of the step is settled or dropped, and all streams have ended."""
        await gather_all(self._scoring.run(), self._generate_all())

    async def _generate_all(self) -> None:
        self._settle.refill()  # What a coordinator that stopped had no time for.
        await self._receive.adopt_finished()
        drives: dict[str, asyncio.Task[None]] = {}
        try:
            while self._index.open:
                news = self._news.next()
                self._start_drives(drives)
                if not drives and self._index.waiting:
                    await self._context.placement.add_rollout(self._published)
                    continue
                futures: set[asyncio.Future[None]] = {news, *drives.values()}
                await asyncio.wait(futures, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                self._leave_the_dead(drives)
                for incarnation in [key for key, task in drives.items() if task.done()]:
                    drives.pop(incarnation).result()
            self._scoring.close()
            await asyncio.gather(*drives.values())
        finally:
            self._scoring.close()
            for task in drives.values():
                task.cancel()
            await asyncio.gather(*drives.values(), return_exceptions=True)

    def _start_drives(self, drives: dict[str, asyncio.Task[None]]) -> None:
        if self._index.waiting:
            for member in self._workers.producers:
                if self._workers.usable(member) and member.incarnation not in drives:
                    drives[member.incarnation] = asyncio.ensure_future(self._drive(member))

    def _leave_the_dead(self, drives: dict[str, asyncio.Task[None]]) -> None:
        """A stream to an instance without a session may hang for long: it is not waited for."""
        for incarnation in [key for key in drives if not self._workers.fleet.alive(key)]:
            drives.pop(incarnation).cancel()

    async def _drive(self, member: RolloutClient) -> None:
        """One stream, from its opening to its end, however it ends."""
        started, why = self._context.event_log.monotonic(), "its stream of work ended early"
        over, revoked = asyncio.Event(), False
        await self._context.modality.prepare(member, self._published)
        assignments = self._work(member, self._dispatch.assignments(member, over.is_set))
        try:
            limit = self._context.spec.limits.step_timeout_s
            async for response in member.generate(self._dispatch.opening(member), assignments, limit):
                await self._take(member, response, over)
                if not self._index.held.get(member.incarnation):
                    self._rests_since.setdefault(member.incarnation, self._context.event_log.monotonic())
                revoked = response.revoked
            if revoked:
                member.lost_lease()
            elif over.is_set() and not await self._context.modality.recover(member):
                await self._context.lost(member, "its work was stopped from outside")
        except InstanceDown as fault:
            why = str(fault)
            await self._context.lost(member, why)
        except CallRefused as refused:
            if revoked := self._workers.lease_ended(member, refused):
                member.lost_lease()
            elif refused.reason == "LEASE_QUIESCED":
                why = "its lease was not renewed in time"
                await self._workers.wait_for_renewal(member)
            else:
                raise
        finally:
            # However a stream ends, samples that it did not finish are made again, and not handed to it once more:
            # gRPC still reads `assignments` when the stream is broken.
            over.set()
            lost = self._dispatch.lost(member)
            if lost and not revoked:
                self._context.note(f"{lost} samples of {member.instance.instance} are made again: {why}")
            self._end_rest(member)
            self._timer.add("generate", (started, self._context.event_log.monotonic()), member.devices)
            self._news.beat()

    def _time_stages(self, member: RolloutClient, response: Produced) -> None:
        """Policy and environments, or two policies, take turns within generate.

        The environments' time is on no device of the run.
        """
        now = self._context.event_log.monotonic()
        for metrics in response.stages:
            seconds = metrics.wall_time.ToNanoseconds() / 1e9
            stage, devices = metrics.stage, member.devices
            if stage == "answer":
                stage = OWN_TURN
            elif stage == "reply":
                stage = self._context.spec.graph.reply_stage
                devices = tuple(self._context.repliers.devices)
            elif stage == "simulate":
                devices = ()
            self._timer.add(stage, (now - seconds, now), devices)

    def _time_prefills(self, member: RolloutClient, response: rollout.GenerateResponse) -> None:
        """Prompts are computed within generate, where the engine tells it apart."""
        now = self._context.event_log.monotonic()
        for prefill in response.prefills:
            began = now - prefill.began_ago.ToNanoseconds() / 1e9
            lasted = prefill.lasted.ToNanoseconds() / 1e9
            self._timer.add("prefill", (began, min(now, began + lasted)), member.devices)

    async def _work(
        self, member: RolloutClient, assignments: AsyncIterator[rollout.AssignGroups]
    ) -> AsyncIterator[rollout.AssignGroups]:
        async for message in assignments:
            self._end_rest(member)
            yield message

    def _end_rest(self, member: RolloutClient) -> None:
        """The time since the member's last answer is over: it has work again, or its stream has ended."""
        if (since := self._rests_since.pop(member.incarnation, None)) is not None:
            self._timer.rested((since, self._context.event_log.monotonic()), member.devices)

    async def _take(self, member: RolloutClient, response: Produced, over: asyncio.Event) -> None:
        # Before anything is waited for: times are told as times ago.
        self._time_stages(member, response)
        if isinstance(response, rollout.GenerateResponse):
            self._time_prefills(member, response)
        if self._context.modality.takes_losses(member, response):
            over.set()
        bodies = [chunk.finished for chunk in response.chunks if chunk.HasField("finished")]
        if bodies:
            if self._relay.full:
                with self._context.fleet.waits.named(self._context.run_id, TRAINER_BEHIND, after=SHOWN_S):
                    await self._relay.wait_for_room(self._draining)
            await self._receive.take_bodies(bodies)
        if response.partials or response.revoked:
            over.set()
            self._receive.take_partials(member, response.partials)
