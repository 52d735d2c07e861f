"""One instance at work for one run: the authority of its calls, their deadlines, and the end of its work."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace.trainer.v1 import trainer_pb2 as trainer

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


@dataclass
class WorkerClient:
    """The coordinator's client of one instance for one run; each kind of instance adds its own calls."""

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

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        """Calls the instance under the run's authority; returns the method's response message."""
        request.header.CopyFrom(self.header())
        return await self.instance_client.call(method, request, timeout)

    def stream(self, method: str, request: Any, timeout: float) -> AsyncIterator[Any]:
        """The responses to one request, under the run's authority."""
        request.header.CopyFrom(self.header())
        return self.instance_client.stream(method, request, timeout)

    def lost_lease(self) -> None:
        """Notes that its lease was revoked: it has nothing on its devices any more."""
        self.lease_epoch, self.awake, self.kept = 0, False, False

    async def close_run(self) -> None:
        """Ends everything that the instance does for the run and frees what it keeps of it."""
        method, request = _CLOSE[self.instance.kind]
        await self.call(method, request(), CLOSE_S)
