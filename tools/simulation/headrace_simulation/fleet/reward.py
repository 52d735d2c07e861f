"""A simulated reward service."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.reward.v1 import reward_pb2 as reward

from headrace_simulation.fleet.instances import Instance, nothing


def reward_of(prompt: int, sample: int) -> float:
    """0 or 1; the same for all samples of every third prompt or so."""
    return float((prompt + sample * (not all_equal(prompt))) % 2)


def all_equal(prompt: int) -> bool:
    """Whether the rewards of a prompt's group of two and more are all equal."""
    return zlib.crc32(f"rewards of {prompt}".encode()) % 3 == 0


@dataclass
class Reward(Instance):
    """Gives `reward_of` its slot; now and then a scorer breaks once."""

    KIND: ClassVar[str] = "reward"

    leased: set[str] = field(default_factory=set)
    """Runs that are scored under a lease alone."""

    async def OpenRun(self, request: reward.OpenRunRequest) -> reward.OpenRunResponse:
        if request.leased:
            self.leased.add(request.header.run)
        await self.open_run(request.header, request.config_json, self.take_time, nothing)
        return reward.OpenRunResponse(scorer_digest="simulated")

    async def CloseRun(self, request: reward.CloseRunRequest) -> reward.CloseRunResponse:
        await self.close_run(request.header)
        return reward.CloseRunResponse()

    async def Score(
        self, requests: AsyncIterator[reward.ScoreRequest]
    ) -> AsyncIterator[reward.ScoreResponse]:
        run = ""
        async for request in requests:
            if request.header.run:
                self.fence(request.header, lease=False)
                self.open_runs.applied(request.header)
                run = request.header.run
            while run in self.leased and not self.live_leases():  # noqa: ASYNC110  # the service holds them back
                await asyncio.sleep(0.05)
            await asyncio.sleep(self.rng.uniform(0.01, 0.2))
            items = list(request.items)
            self.rng.shuffle(items)
            for item in items:
                broken = not item.evaluation and self.rng.random() < 0.005
                yield reward.ScoreResponse(
                    results=[
                        reward.ScoreResult(
                            sample=item.sample,
                            attempt=item.attempt,
                            status=reward.SCORE_STATUS_SCORER_BROKEN if broken else reward.SCORE_STATUS_OK,
                            reward=reward_of(item.sample.prompt_ordinal, item.sample.sample_index),
                            evaluation=item.evaluation,
                            stage=item.stage,
                        )
                    ]
                )
