"""How the coordinator reaches an instance: its calls and streams, and the authority and deadlines of a run's calls.

gRPC and the simulation implement `InstanceClient`.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace.trainer.v1 import trainer_pb2 as trainer

from headrace_coordinator.domain.state import InstanceState

Response = TypeVar("Response")

USER_ERRORS = frozenset(
    {"INVALID", "MODEL_NOT_READABLE", "UNIMPLEMENTED", "INVALID_ARGUMENT", "LOG_PROBS_DIFFER"}
)
"""Reasons of refusals that asking again does not change: what is wrong is in the spec, or in what a deterministic run
was promised.
"""


SCORER_AWAY = "SCORER_AWAY"
"""Reason of a reward instance that cannot open a run: what a scorer stands on, such as a judge, is not there now."""


class InstanceDown(Exception):
    """No answer from an instance: dead, cut off or out of time. What it did is unknown."""

    def __init__(self, incarnation: str, message: str) -> None:
        super().__init__(f"{incarnation}: {message}")
        self.incarnation = incarnation


class CallRefused(Exception):
    """An instance answered with an error; `key` is the key of the spec that has to change, where it named one."""

    def __init__(self, incarnation: str, reason: str, message: str, key: str = "") -> None:
        super().__init__(f"{incarnation} refused ({reason}): {message}")
        self.incarnation = incarnation
        self.reason = reason
        self.message = message
        self.key = key

    @property
    def cause(self) -> str:
        """The message without the key that it may begin with."""
        return self.message.removeprefix(f"{self.key}: ") if self.key else self.message


class InstanceClient(Protocol):
    """One instance, by RPC name. Messages are the contracts' own; methods raise `InstanceDown` and `CallRefused`."""

    async def call(self, method: str, request: Any, timeout: float) -> Any:
        """A unary call; returns the method's response message."""

    def stream(self, method: str, sent: Any, timeout: float) -> AsyncIterator[Any]:
        """The responses to one request, or to an iterator of them; closing the responses cancels the call."""


Connect = Callable[[str, str, str], InstanceClient]
"""(kind, address, incarnation) → the client of an instance."""


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
