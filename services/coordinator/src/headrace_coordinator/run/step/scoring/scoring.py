"""Finished trajectories to the reward services and their results back; retries a broken scorer, then gives up."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.fleet.instance_client import InstanceDown
from headrace_coordinator.run.staffing import Staffing
from headrace_coordinator.run.step.scoring.streams import Lane, Question, now
from headrace_coordinator.run.step.timer import StepTimer

SCORER_RETRIES = 2
BATCH = 512
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
        metadata_json=item.metadata_json,
        finish_reason=body.finish_reason,
        token_count=tokens,
        evaluation=evaluation,
    )


def sampled(body: common.Trajectory) -> tuple[int, list[tuple[int, int]]]:
    """How many tokens were sampled, and (number of a version, tokens that it sampled), in order.

    An action that was executed counts as a token.
    """
    total, spans = 0, []
    for segment in body.segments:
        if number := segment.policy_number:
            episode = segment.WhichOneof("body") == "actions"
            count = sum(segment.actions.valid_mask.data) if episode else len(segment.tokens.token_ids)
            spans.append((number, count))
            total += count
    return total, spans


def first_log_probs(body: common.Trajectory, most: int) -> array[float]:
    """The engine's log-probs of the first sampled tokens."""
    found = array("f")
    for part in body.segments:
        if part.policy_number:
            found.extend(part.tokens.log_probs[: most - len(found)])
    return found


def first_text_bytes(body: common.Trajectory, most: int) -> array[int]:
    """The bytes of text that each of the first sampled tokens is; empty where the producer does not say."""
    found = array("I")
    for part in body.segments:
        if part.policy_number:
            found.extend(part.tokens.text_bytes[: most - len(found)])
    return found


class Scoring:
    """Scores what is put in, on every reward instance of the run, until `close`.

    `main_stage`: the name of the stage that items without one are of.
    """

    def __init__(
        self,
        staffing: Staffing,
        timer: StepTimer,
        deliver: Callable[[list[reward.ScoreResult]], None],
        main_stage: str = "score",
    ) -> None:
        self._staffing = staffing
        self._workers = staffing.workers
        self._timer = timer
        self._deliver = deliver
        self._waiting: list[reward.ScoreItem] = []
        self._lanes = staffing.lanes
        self._broken: Counter[Question] = Counter()
        self._closed = False
        self._main_stage = main_stage
        self._open: Counter[str] = Counter()
        """Open questions by stage; when a stage's first one was asked is in `_busy_since`."""
        self._busy_since: dict[str, float] = {}

    def put(self, item: reward.ScoreItem) -> None:
        """Scores one answer soon, together with whatever else waits."""
        self._waiting.append(item)
        self._lanes.news.beat()

    def close(self) -> None:
        """No more answers will come."""
        self._closed = True
        self._lanes.news.beat()

    @property
    def _finished(self) -> bool:
        return self._closed and not self._waiting and not any(lane.asked for lane in self._lanes.all)

    @property
    def _limit_s(self) -> float:
        return self._workers.spec.limits.step_timeout_s

    async def run(self) -> None:
        """Until closed and everything has its result. A lost instance's questions go to another one."""
        draining = self._workers.fleet.any_draining
        staying = [member for member in self._workers.rewards if not draining([member])]
        self._lanes.begin(self, staying, self._limit_s)
        try:
            while not self._finished:
                news = self._lanes.news.next()
                if self._waiting:
                    await self._open_lanes()
                futures: set[asyncio.Future[None]] = {news, *(lane.task for lane in self._lanes.all)}
                await asyncio.wait(futures, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for lane in list(self._lanes.all):
                    await self._look_after(lane)
        finally:
            if self._finished:
                self._lanes.rest()
            else:
                await self._lanes.end()  # What they were asked, nobody wants to know.

    async def _open_lanes(self) -> None:
        open_to = {lane.member.incarnation for lane in self._lanes.live}
        if not open_to:
            await self._staffing.staff_rewards()
        for member in self._workers.rewards:
            if member.incarnation not in open_to:
                self._lanes.open(member, self._limit_s)

    async def _look_after(self, lane: Lane) -> None:
        """Ends a lane whose instance is gone or silent; takes a lane that has ended out of service."""
        patience = self._workers.spec.reward.timeout_s * len(lane.asked) + GRACE_S
        silent = bool(lane.asked) and now() - lane.heard_at > patience
        if silent or not self._workers.fleet.alive(lane.member.incarnation):
            lane.task.cancel()
        elif not lane.task.done():
            return
        lane.over = True
        await asyncio.wait({lane.task})
        self._lanes.all.remove(lane)
        error = None if lane.task.cancelled() else lane.task.exception()
        if error is not None and not isinstance(error, InstanceDown):
            raise error
        if lane.asked or error is not None or lane.task.cancelled():
            self._waiting[:0] = lane.asked.values()
            for item in lane.asked.values():
                self._count(item.stage, -1)
            if lane.member in self._workers.rewards:
                self._workers.rewards.remove(lane.member)
            await self._workers.fleet.fate(lane.member.incarnation)

    # --- one lane

    def share(self, lane: Lane) -> list[reward.ScoreItem]:
        """What waits, up to this lane's fair part of everything that is open."""
        everything = len(self._waiting) + sum(len(each.asked) for each in self._lanes.all)
        fair = -(-everything // len(self._lanes.live))
        count = max(0, min(BATCH, fair - len(lane.asked)))
        items, self._waiting = self._waiting[:count], self._waiting[count:]
        if items and not lane.asked:
            lane.heard_at = now()
        for item in items:
            lane.asked[_question(item)] = item
            self._count(item.stage, 1)
        return items

    def _count(self, stage: str, change: int) -> None:
        """A stage's time is that in which some of its questions are open."""
        clock = self._workers.fleet.event_log.monotonic
        if not self._open[stage]:
            self._busy_since[stage] = clock()
        self._open[stage] += change
        if not self._open[stage]:
            self._timer.add(stage or self._main_stage, (self._busy_since.pop(stage), clock()))

    def take(self, lane: Lane, results: Iterable[reward.ScoreResult]) -> None:
        """Final results go on; a broken scorer is asked again."""
        final: list[reward.ScoreResult] = []
        for result in results:
            question = _question(result)
            item = lane.asked.pop(question, None)
            if item is None:
                continue
            self._count(item.stage, -1)
            if result.status == reward.SCORE_STATUS_SCORER_BROKEN and self._broken[question] < SCORER_RETRIES:
                self._broken[question] += 1
                self._waiting.append(item)
            else:
                final.append(result)
        if final:
            self._deliver(final)
        self._lanes.news.beat()


def _question(message: reward.ScoreItem | reward.ScoreResult) -> Question:
    return (message.sample.prompt_ordinal, message.sample.sample_index, message.stage)


async def score_all(staffing: Staffing, items: Iterable[reward.ScoreItem]) -> list[reward.ScoreResult]:
    """A result for each item, in any order."""
    results: list[reward.ScoreResult] = []
    scoring = Scoring(staffing, StepTimer(staffing.workers.fleet.event_log.monotonic), results.extend)
    for item in items:
        scoring.put(item)
    scoring.close()
    await scoring.run()
    return results
