"""Fills the open step's slots: dispatch, chunks in, scoring, settled groups out.

A lost rollout's work is re-issued; a group whose member cannot be made or scored is dropped whole.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_servicekit.rpc.digests import digest_and_size

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.dispatch import Dispatcher, GroupWork
from headrace_coordinator.domain.slots import DROPPED, FINISHED, PENDING, Offer, Slot, accepts, plan_assign
from headrace_coordinator.fleet.ports import InstanceDown
from headrace_coordinator.fleet.waits import Notifier
from headrace_coordinator.projections.trajectories import LOG_PROBS_KEPT
from headrace_coordinator.run.clients import Published, RolloutClient, SlotKey
from headrace_coordinator.run.concurrency import gather_all
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.stages.relay import Relay
from headrace_coordinator.run.stages.scoring import (
    Scoring,
    first_log_probs,
    sampled,
    score_item,
    version_spans,
)
from headrace_coordinator.run.stages.step_timer import StepTimer

SAMPLE_RETRIES = 2
LOOK_S = 5.0
TAKEN_AT_ONCE, TAKEN_BYTES = 64, 1 << 20
"""Bodies of a large response: while the next ones are looked at, these are scored."""


@dataclass
class Scored:
    """A finished trajectory's final reward."""

    reward: float
    parts: dict[str, float]
    completion: str
    finish_reason: int
    tokens: int
    oldest: int
    versions: list[tuple[int, int]] = field(default_factory=list)
    log_probs: array[float] = field(default_factory=lambda: array("f"))


@dataclass
class Batch:
    """What a step has gathered so far."""

    scored: dict[SlotKey, Scored] = field(default_factory=dict)
    refused: int = 0


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
    ) -> None:
        self._context = context
        self._workers = context.workers
        self._ledger = context.state.ledger
        self._relay = relay
        self._timer = timer
        self._published = published
        self._on_settled = on_settled
        self._on_complete = on_complete
        self._draining = draining
        self._scoring = Scoring(context.workers, timer, self._take_scores)
        self._failures: Counter[SlotKey] = Counter()
        self._prefixes: dict[SlotKey, common.ResumeState] = {}
        self._finished: dict[SlotKey, tuple[int, int, int, str, int]] = {}
        self._news = Notifier()
        self.batch = Batch()
        self._open = {
            prompt for prompt in self._ledger.prompts if self._ledger.group(prompt)[0].state != DROPPED
        }
        expected = None if context.spec.deterministic else context.expected_tokens
        self._dispatcher = Dispatcher(self._pending_work(), expected)

    def _pending_work(self) -> list[GroupWork]:
        work: dict[int, list[int]] = {}
        for slot in self._ledger.members(PENDING):
            work.setdefault(slot.prompt, []).append(slot.sample)
        return list(work.items())

    @property
    def complete(self) -> bool:
        """Every group of the step is settled or dropped."""
        return not self._open

    async def run(self) -> None:
        """Until every group of the step is settled or dropped, and all streams have ended."""
        await gather_all(self._scoring.run(), self._generate_all())

    async def _generate_all(self) -> None:
        await self._adopt_finished()
        drives: dict[str, asyncio.Task[None]] = {}
        try:
            while not self.complete:
                news = self._news.next()
                self._start_drives(drives)
                if not drives and self._dispatcher.waiting:
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
        if self._dispatcher.waiting:
            for member in self._workers.rollouts:
                if self._workers.usable(member) and member.incarnation not in drives:
                    drives[member.incarnation] = asyncio.ensure_future(self._drive(member))

    async def _adopt_finished(self) -> None:
        """After an aborted attempt: finished slots whose body is still retained go straight to scoring."""
        finished = self._ledger.members(FINISHED)
        found = await self._relay.bodies(finished, self._workers.rollouts) if finished else {}
        for key, (body, size) in found.items():
            self._score(key, body, size, *sampled(body))
        keys = [(slot.prompt, slot.sample) for slot in finished]
        self._dispatcher.put_back([key for key in keys if key not in found])

    # --- one rollout

    async def _drive(self, member: RolloutClient) -> None:
        started, why = self._context.event_log.monotonic(), "its Generate stream ended early"
        over, revoked = asyncio.Event(), False
        assignments, limit = self._assignments(member, over), self._context.spec.limits.step_timeout_s
        try:
            async for response in member.generate(self._opening(), assignments, limit):
                bodies = [chunk.finished for chunk in response.chunks if chunk.HasField("finished")]
                if bodies:
                    await self._relay.wait_for_room(self._draining)
                    await self._take_bodies(member, bodies)
                if response.partials or response.revoked:
                    over.set()
                    self._take_partials(member, response.partials)
                revoked = response.revoked
            if revoked:
                member.lost_lease()
            elif over.is_set():
                await self._context.lost(member, "its work was stopped from outside")
        except InstanceDown as fault:
            why = str(fault)
            await self._context.lost(member, why)
        finally:
            # However a stream ends, samples that it did not finish are made again, and not handed to it once more:
            # gRPC still reads `assignments` when the stream is broken.
            over.set()
            self._requeue(member, "" if revoked else why)
            self._timer.add("generate", (started, self._context.event_log.monotonic()), member.devices)
            self._news.beat()

    def _leave_the_dead(self, drives: dict[str, asyncio.Task[None]]) -> None:
        """A stream to an instance without a session may hang for long: it is not waited for."""
        for incarnation in [key for key in drives if not self._workers.fleet.alive(key)]:
            drives.pop(incarnation).cancel()

    def _requeue(self, member: RolloutClient, why: str) -> None:
        lost = self._dispatcher.lost(member.incarnation)
        if lost and why:
            self._context.note(f"{len(lost)} samples of {member.instance.instance} are made again: {why}")

    def _opening(self) -> rollout.GenerateOpen:
        spec = self._context.spec
        return rollout.GenerateOpen(
            policy_number=self._published.version.number,
            distribution=self._context.distribution(spec.sampling.temperature),
            max_new_tokens=spec.sampling.max_new_tokens,
            stop=spec.sampling.stop,
            seed=spec.seed,
            chunk_tokens=spec.rollout.chunk_tokens,
            deterministic=spec.deterministic,
        )

    async def _assignments(
        self, member: RolloutClient, over: asyncio.Event
    ) -> AsyncIterator[rollout.AssignGroups]:
        while not (self.complete or over.is_set()):
            news = self._news.next()
            live = sum(self._workers.fleet.alive(m.incarnation) for m in self._workers.rollouts)
            work = self._dispatcher.take(member.incarnation, member.max_concurrency, live)
            if work:
                yield await self._assign(member, work)
            else:
                await asyncio.shield(news)

    async def _assign(self, member: RolloutClient, work: list[GroupWork]) -> rollout.AssignGroups:
        slots = [self._slot(prompt, sample) for prompt, samples in work for sample in samples]
        assigned = plan_assign(
            self._ledger, self._context.run_id, slots, member.incarnation, self._context.event_log.now()
        )
        await self._context.event_log.commit(assigned)
        attempts = iter(attempt for _, _, attempt, _ in assigned.slots)
        message = rollout.AssignGroups()
        for prompt, samples in work:
            group = message.groups.add(prompt_ordinal=prompt, prompt=self._context.prompt(prompt))
            for sample in samples:
                resume = self._prefixes.get((prompt, sample))
                group.samples.add(sample_index=sample, attempt=next(attempts), resume=resume)
        return message

    def _slot(self, prompt: int, sample: int) -> Slot:
        slot = self._ledger.slot(prompt, sample)
        assert slot is not None, f"({prompt}, {sample}) is not a slot of the open step"
        return slot

    # --- chunks in

    def _take_partials(self, member: RolloutClient, partials: Iterable[rollout.PartialSample]) -> None:
        """Samples that were stopped (a drain, a late or revoked lease) go on from their prefix elsewhere."""
        for partial in partials:
            key = (partial.sample.prompt_ordinal, partial.sample.sample_index)
            slot = self._ledger.slot(*key)
            if slot is None or (slot.holder, slot.attempt) != (member.incarnation, partial.attempt):
                self.batch.refused += 1
                continue
            if partial.state.token_ids:
                self._prefixes[key] = partial.state
            self._dispatcher.done(member.incarnation, *key)
            self._dispatcher.put_back([key])
        self._news.beat()

    async def _take_bodies(self, member: RolloutClient, bodies: list[common.Trajectory]) -> None:
        taken = size = 0
        for body in bodies:
            taken, size = taken + 1, size + self._take_body(member, body)
            if taken == len(bodies) or taken % TAKEN_AT_ONCE == 0 or size >= TAKEN_BYTES:
                self._post_finished()
                self._news.beat()  # There is room for the next group.
                size = 0
                await asyncio.sleep(0)

    def _take_body(self, member: RolloutClient, body: common.Trajectory) -> int:
        """Returns its size in bytes."""
        sample = body.sample
        key = (sample.prompt_ordinal, sample.sample_index)
        digest, size = digest_and_size(body)
        if key in self._finished:
            self._post_finished()
        tokens, policies = sampled(body)
        why_not = accepts(self._ledger, Offer(*key, body.attempt, digest, tokens))
        if why_not or digest != body.body_digest:
            self.batch.refused += 1
            return size
        self._dispatcher.done(member.incarnation, *key)
        if body.finish_reason == common.FINISH_REASON_PROMPT_TOO_LONG:
            self._drop(key[0], "PROMPT_TOO_LONG", "the prompt does not fit model.max_context")
        elif body.finish_reason in (common.FINISH_REASON_ERROR, common.FINISH_REASON_ABORTED):
            self._retry(key, f"ended with {common.FinishReason.Name(body.finish_reason)}")
        elif self._stale(policies):
            self._drop(key[0], "ABANDONED", "a segment is too stale or of an abandoned version")
        else:
            self._score(key, body, size, tokens, policies)
            self._finished[key] = (*key, body.attempt, digest, tokens)
            self._context.saw_length(key[0], tokens)
        return size

    def _stale(self, policies: set[int]) -> bool:
        lineage, base = self._context.state.lineage, self._published.version.number
        limit = self._context.spec.algorithm.max_staleness
        for number in policies:
            staleness = lineage.staleness(number, base)
            if staleness is None or staleness > limit:
                return True
        return False

    def _post_finished(self) -> None:
        """One event for what one response brought; before whatever else is said of these slots."""
        if self._finished:
            slots, self._finished = list(self._finished.values()), {}
            self._context.event_log.post(
                ev.SlotsFinished(at=self._context.event_log.now(), run=self._context.run_id, slots=slots)
            )

    def _score(
        self, key: SlotKey, body: common.Trajectory, size: int, tokens: int, policies: set[int]
    ) -> None:
        self.batch.scored[key] = Scored(
            reward=float("nan"),
            parts={},
            completion=body.completion_text,
            finish_reason=body.finish_reason,
            tokens=tokens,
            oldest=min(policies, default=self._published.version.number),
            versions=version_spans(body),
            log_probs=first_log_probs(body, LOG_PROBS_KEPT),
        )
        self._relay.put(key, body, size)
        self._scoring.put(score_item(self._context.item(key[0]), body, tokens, evaluation=False))

    def _retry(self, key: SlotKey, why: str) -> None:
        self._failures[key] += 1
        if self._failures[key] > SAMPLE_RETRIES:
            self._drop(
                key[0], "GROUP_INCOMPLETE", f"sample {key[1]} failed {self._failures[key]} times: {why}"
            )
        else:
            self._dispatcher.put_back([key])
            self._news.beat()

    def _drop(self, prompt: int, reason: str, detail: str) -> None:
        self._post_finished()
        if self._ledger.group(prompt)[0].state == DROPPED:
            return
        self._context.event_log.post(
            ev.GroupDropped(
                at=self._context.event_log.now(),
                run=self._context.run_id,
                step=self._ledger.step,
                prompt=prompt,
                reason=reason,
                detail=detail,
            )
        )
        self._close(prompt)
        self._dispatcher.forget(prompt)
        self._relay.drop((prompt, sample) for sample in range(self._ledger.group_size))
        self._news.beat()

    def _close(self, prompt: int) -> None:
        """Settled or dropped. The last one says so at once: `run` has streams to end before it returns."""
        self._open.discard(prompt)
        if self.complete:
            self._on_complete()

    # --- scores in

    def _take_scores(self, results: list[reward.ScoreResult]) -> None:
        touched: dict[int, None] = {}
        for result in results:
            key = (result.sample.prompt_ordinal, result.sample.sample_index)
            slot, scored = self._ledger.slot(*key), self.batch.scored.get(key)
            if slot is None or scored is None or slot.attempt != result.attempt or slot.state != FINISHED:
                self.batch.refused += 1
            elif result.status == reward.SCORE_STATUS_SCORER_BROKEN:
                self._drop(key[0], "GROUP_INCOMPLETE", f"a scorer is broken: {result.detail}")
            else:
                scored.reward, scored.parts = result.reward, dict(result.parts)
                touched[key[0]] = None
        self._settle({prompt: rewards for prompt in touched if (rewards := self._rewards(prompt))})

    def _rewards(self, prompt: int) -> list[float]:
        """Final rewards of a whole group, by sample; empty while one is missing or the group is dropped."""
        group = self._ledger.group(prompt)
        scores = [self.batch.scored.get((prompt, slot.sample)) for slot in group]
        rewards = [
            scored.reward for scored in scores if scored is not None and scored.reward == scored.reward
        ]
        whole = len(rewards) == len(group) and all(slot.state == FINISHED for slot in group)
        return rewards if whole else []

    def _settle(self, groups: dict[int, list[float]]) -> None:
        if not groups:
            return
        now, run = self._context.event_log.now(), self._context.run_id
        self._context.event_log.post(ev.GroupsSettled(at=now, run=run, groups=list(groups.items())))
        for prompt in groups:
            self._on_settled(prompt)
            self._close(prompt)
        self._news.beat()
