"""Finished trajectories to the reward service, in batches; retries a broken scorer, then gives up on the group."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.ports import InstanceDown
from headrace_coordinator.run.crew import Crew
from headrace_coordinator.run.members import SlotKey
from headrace_coordinator.run.meter import Meter

SCORER_RETRIES = 2
BATCH = 512


def score_item(item: DataItem, prompt: str, body: common.Trajectory, *, evaluation: bool) -> reward.ScoreItem:
    """What the reward service needs of a trajectory."""
    return reward.ScoreItem(
        sample=body.sample,
        attempt=body.attempt,
        prompt=prompt,
        completion=body.completion_text,
        reference=item.answer,
        metadata_json=json.dumps(item.metadata),
        finish_reason=body.finish_reason,
        token_count=sampled_tokens(body),
        evaluation=evaluation,
    )


def sampled_tokens(body: common.Trajectory) -> int:
    """Number of tokens that a policy sampled."""
    return sum(len(segment.tokens.token_ids) for segment in body.segments if segment.policy_number)


class Scoring:
    """Scores what is put in, a few batches at a time, until `close`."""

    def __init__(
        self, crew: Crew, meter: Meter, deliver: Callable[[list[reward.ScoreResult]], Awaitable[None]]
    ) -> None:
        self._crew = crew
        self._meter = meter
        self._deliver = deliver
        self._waiting: list[reward.ScoreItem] = []
        self._work = asyncio.Event()
        self._broken: Counter[SlotKey] = Counter()
        self._closed = False

    def put(self, item: reward.ScoreItem) -> None:
        """Scores one answer soon, together with whatever else waits."""
        self._waiting.append(item)
        self._work.set()

    def close(self) -> None:
        """No more answers will come."""
        self._closed = True
        self._work.set()

    async def run(self) -> None:
        """Until closed and empty."""
        while not (self._closed and not self._waiting):
            await self._work.wait()
            if not self._closed:
                self._work.clear()
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            if batch:
                await self._score(batch)

    async def _score(self, batch: Sequence[reward.ScoreItem]) -> None:
        with self._meter.stage("score"):
            results = await score_with_retry(self._crew, batch)
        final: list[reward.ScoreResult] = []
        items = {(i.sample.prompt_ordinal, i.sample.sample_index): i for i in batch}
        for result in results:
            slot = (result.sample.prompt_ordinal, result.sample.sample_index)
            if result.status == reward.SCORE_STATUS_SCORER_BROKEN and self._broken[slot] < SCORER_RETRIES:
                self._broken[slot] += 1
                self.put(items[slot])
            else:
                final.append(result)
        if final:
            await self._deliver(final)


async def score_with_retry(crew: Crew, batch: Sequence[reward.ScoreItem]) -> list[reward.ScoreResult]:
    """Results from any reward instance; a lost one is replaced, within the run's deadline."""
    timeout = crew.spec.reward.timeout_s * len(batch) + 60
    while True:
        await crew.staff_rewards()
        member = crew.rewards[batch[0].sample.prompt_ordinal % len(crew.rewards)]
        try:
            return await member.score(batch, timeout)
        except InstanceDown:
            crew.rewards.remove(member)
            await crew.fleet.fate(member.incarnation)
