"""Finished trajectories to the reward services and their results back; retries a broken scorer, then gives up."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.fleet.ports import InstanceDown
from headrace_coordinator.fleet.waits import Notifier
from headrace_coordinator.run.clients import RewardClient, SlotKey
from headrace_coordinator.run.stages.step_timer import StepTimer
from headrace_coordinator.run.workers import WorkerGroup

SCORER_RETRIES = 2
BATCH = 512
IDLE_S = 1.0
"""A stream without questions ends after so long: an open one would look like a call that hangs."""
GRACE_S = 60.0
"""Beyond reward.timeout_s for each open question: what an instance may take for everything else."""
LOOK_S = 5.0


def score_item(item: DataItem, body: common.Trajectory, tokens: int, *, evaluation: bool) -> reward.ScoreItem:
    """What the reward service needs of a trajectory, of which a policy sampled `tokens`."""
    return reward.ScoreItem(
        sample=body.sample,
        attempt=body.attempt,
        prompt=item.question,
        completion=body.completion_text,
        reference=item.answer,
        metadata_json=json.dumps(item.metadata) if item.metadata else "",
        finish_reason=body.finish_reason,
        token_count=tokens,
        evaluation=evaluation,
    )


def sampled(body: common.Trajectory) -> tuple[int, set[int]]:
    """How many tokens were sampled, and the numbers of the policies that did."""
    tokens, policies = 0, set()
    for segment in body.segments:
        if number := segment.policy_number:
            policies.add(number)
            tokens += len(segment.tokens.token_ids)
    return tokens, policies


def version_spans(body: common.Trajectory) -> list[tuple[int, int]]:
    """(number of a version, tokens that it sampled), in order."""
    return [(part.policy_number, len(part.tokens.token_ids)) for part in body.segments if part.policy_number]


def first_log_probs(body: common.Trajectory, most: int) -> array[float]:
    """The engine's log-probs of the first sampled tokens."""
    found = array("f")
    for part in body.segments:
        if part.policy_number:
            found.extend(part.tokens.log_probs[: most - len(found)])
    return found


@dataclass(eq=False)
class _Lane:
    """The stream to one instance, and what it was asked."""

    member: RewardClient
    heard_at: float
    task: asyncio.Task[None] = field(init=False)
    asked: dict[SlotKey, reward.ScoreItem] = field(default_factory=dict)
    over: bool = False


class Scoring:
    """Scores what is put in, on every reward instance of the run, until `close`."""

    def __init__(
        self, workers: WorkerGroup, timer: StepTimer, deliver: Callable[[list[reward.ScoreResult]], None]
    ) -> None:
        self._workers = workers
        self._timer = timer
        self._deliver = deliver
        self._waiting: list[reward.ScoreItem] = []
        self._lanes: list[_Lane] = []
        self._news = Notifier()
        self._broken: Counter[SlotKey] = Counter()
        self._closed = False
        self._busy_since: float | None = None

    def put(self, item: reward.ScoreItem) -> None:
        """Scores one answer soon, together with whatever else waits."""
        self._waiting.append(item)
        self._news.beat()

    def close(self) -> None:
        """No more answers will come."""
        self._closed = True
        self._news.beat()

    @property
    def _finished(self) -> bool:
        return self._closed and not self._waiting and not any(lane.asked for lane in self._lanes)

    async def run(self) -> None:
        """Until closed and everything has its result. A lost instance's questions go to another one."""
        try:
            while not self._finished:
                news = self._news.next()
                if self._waiting:
                    await self._open_lanes()
                futures: set[asyncio.Future[None]] = {news, *(lane.task for lane in self._lanes)}
                await asyncio.wait(futures, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for lane in list(self._lanes):
                    await self._look_after(lane)
            await asyncio.gather(*(lane.task for lane in self._lanes))
        finally:
            for lane in self._lanes:
                lane.task.cancel()
            await asyncio.gather(*(lane.task for lane in self._lanes), return_exceptions=True)

    async def _open_lanes(self) -> None:
        if not self._lanes:
            await self._workers.staff_rewards()
        open_to = {lane.member.incarnation for lane in self._lanes}
        for member in self._workers.rewards:
            if member.incarnation not in open_to:
                lane = _Lane(member, self._now())
                lane.task = asyncio.ensure_future(self._converse(lane))
                self._lanes.append(lane)

    async def _look_after(self, lane: _Lane) -> None:
        """Ends a lane whose instance is gone or silent; takes a lane that has ended out of service."""
        patience = self._workers.spec.reward.timeout_s * len(lane.asked) + GRACE_S
        silent = bool(lane.asked) and self._now() - lane.heard_at > patience
        if silent or not self._workers.fleet.alive(lane.member.incarnation):
            lane.task.cancel()
        elif not lane.task.done():
            return
        lane.over = True
        await asyncio.wait({lane.task})
        self._lanes.remove(lane)
        error = None if lane.task.cancelled() else lane.task.exception()
        if error is not None and not isinstance(error, InstanceDown):
            raise error
        if lane.asked or error is not None or lane.task.cancelled():
            self._waiting[:0] = lane.asked.values()
            if lane.member in self._workers.rewards:
                self._workers.rewards.remove(lane.member)
            await self._workers.fleet.fate(lane.member.incarnation)

    # --- one lane

    async def _converse(self, lane: _Lane) -> None:
        limit = self._workers.spec.limits.step_timeout_s
        try:
            async for response in lane.member.score(self._questions(lane), limit):
                lane.heard_at = self._now()
                self._take(lane, response.results)
        finally:
            lane.over = True

    async def _questions(self, lane: _Lane) -> AsyncIterator[Sequence[reward.ScoreItem]]:
        # gRPC still reads this when the stream is broken: a lane that is over takes nothing more.
        while not (lane.over or self._finished):
            news = self._news.next()
            if items := self._share(lane):
                if not lane.asked:
                    lane.heard_at = self._now()
                if self._busy_since is None:
                    self._busy_since = self._workers.fleet.event_log.monotonic()
                lane.asked.update((_slot(item), item) for item in items)
                yield items
            elif not (await asyncio.wait({news}, timeout=IDLE_S))[0] and not lane.asked:
                return

    def _share(self, lane: _Lane) -> list[reward.ScoreItem]:
        """What waits, up to this lane's fair part of everything that is open."""
        everything = len(self._waiting) + sum(len(each.asked) for each in self._lanes)
        fair = -(-everything // len(self._lanes))
        count = max(0, min(BATCH, fair - len(lane.asked)))
        items, self._waiting = self._waiting[:count], self._waiting[count:]
        return items

    def _take(self, lane: _Lane, results: Iterable[reward.ScoreResult]) -> None:
        final: list[reward.ScoreResult] = []
        for result in results:
            slot = _slot(result)
            item = lane.asked.pop(slot, None)
            if item is None:
                continue
            if result.status == reward.SCORE_STATUS_SCORER_BROKEN and self._broken[slot] < SCORER_RETRIES:
                self._broken[slot] += 1
                self._waiting.append(item)
            else:
                final.append(result)
        if self._busy_since is not None and not any(each.asked for each in self._lanes):
            self._timer.add("score", (self._busy_since, self._workers.fleet.event_log.monotonic()))
            self._busy_since = None
        if final:
            self._deliver(final)
        self._news.beat()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _slot(message: reward.ScoreItem | reward.ScoreResult) -> SlotKey:
    return (message.sample.prompt_ordinal, message.sample.sample_index)


async def score_all(workers: WorkerGroup, items: Iterable[reward.ScoreItem]) -> list[reward.ScoreResult]:
    """A result for each item, in any order."""
    results: list[reward.ScoreResult] = []
    scoring = Scoring(workers, StepTimer(workers.fleet.event_log.monotonic), results.extend)
    for item in items:
        scoring.put(item)
    scoring.close()
    await scoring.run()
    return results
