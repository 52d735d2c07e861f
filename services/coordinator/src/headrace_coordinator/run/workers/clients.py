"""Instances at work for a run: what all have in common, with the calls of reward instances and simulators.

A call carries its authority and has a deadline. The calls of `rollout_client` and `trainer_client` are longer.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.sections.scoring import RewardSection

from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.instance_client import InstanceClient

QUICK_S, SLOW_S, LOAD_S, CLOSE_S = 30.0, 120.0, 900.0, 90.0
"""Deadlines: bookkeeping; moving memory; loading or writing a model; closing a run."""
_CLOSE = {
    "rollout": ("CloseRun", rollout.CloseRunRequest),
    "trainer": ("CloseRun", trainer.CloseRunRequest),
    "reward": ("CloseRun", reward.CloseRunRequest),
    "simulator": ("ClosePool", simulator.ClosePoolRequest),
}
"""By kind; a ClosePool that names no pool closes all of the run."""

SlotKey = tuple[int, int]


def sample_key(slot: SlotKey) -> common.SampleKey:
    """(prompt ordinal, sample index) as the contracts' key."""
    return common.SampleKey(prompt_ordinal=slot[0], sample_index=slot[1])


@dataclass
class Published:
    """A version that can be installed."""

    version: common.PolicyVersion
    manifest: common.WeightManifest
    source: common.WeightSource
    files: rollout.PolicyFiles | None = None
    """Read from disk in place of manifest and source; the version's digest may be empty until it was read."""


@dataclass
class WorkerClient:
    """One instance at work for one run."""

    run: str
    instance: InstanceState
    instance_client: InstanceClient
    coordinator_epoch: int
    devices: tuple[str, ...] = ()
    lease_epoch: int = 0
    awake: bool = False
    installed: int = 0
    """The version that it generates with; 0 for none."""
    open_id: int = 0
    opened: bool = False
    kept: bool = False
    """It has no devices and stayed loaded."""
    _requests: ClassVar[Iterable[int]] = itertools.count(1)

    @property
    def incarnation(self) -> str:
        """Id of the process."""
        return self.instance.incarnation

    def header(self) -> common.CommandHeader:
        """Authority of the next call."""
        number = next(iter(self._requests))
        return common.CommandHeader(
            request_id=f"{self.run}-{self.coordinator_epoch}-{number}",
            run=f"runs/{self.run}",
            coordinator_epoch=self.coordinator_epoch,
            lease_epoch=self.lease_epoch,
            open_id=self.open_id,
            command_sequence=(self.coordinator_epoch << 32) + number,
        )

    def lost_lease(self) -> None:
        """Its lease was revoked: it has nothing on its devices any more."""
        self.lease_epoch, self.awake, self.kept = 0, False, False

    async def close_run(self) -> None:
        """Ends everything that the instance does for the run and frees what it keeps of it."""
        method, request = _CLOSE[self.instance.kind]
        await self.instance_client.call(method, request(header=self.header()), CLOSE_S)


@dataclass
class RewardClient(WorkerClient):
    """A reward instance."""

    async def open_run(self, section: RewardSection) -> None:
        """Loads and tries the scorers, within their own limits."""
        request = reward.OpenRunRequest(header=self.header(), config_json=section.model_dump_json())
        await self.instance_client.call("OpenRun", request, section.opening_s + QUICK_S)

    def score(
        self, batches: AsyncIterator[Sequence[reward.ScoreItem]], timeout: float
    ) -> AsyncIterator[reward.ScoreResponse]:
        """Answers in, their results out, in any order."""

        async def requests() -> AsyncIterator[reward.ScoreRequest]:
            async for items in batches:
                yield reward.ScoreRequest(header=self.header(), items=items)

        return self.instance_client.stream("Score", requests(), timeout)


@dataclass
class SimulatorClient(WorkerClient):
    """A simulator instance."""

    async def open_pool(
        self, request: simulator.OpenPoolRequest, limit_s: float = LOAD_S
    ) -> simulator.OpenPoolResponse:
        """Makes environments; fills in the authority."""
        request.header.CopyFrom(self.header())
        response: simulator.OpenPoolResponse = await self.instance_client.call("OpenPool", request, limit_s)
        return response

    async def close_pool(self, pool: str) -> None:
        """Ends the environments of a pool."""
        request = simulator.ClosePoolRequest(header=self.header(), pool=pool)
        await self.instance_client.call("ClosePool", request, CLOSE_S)
