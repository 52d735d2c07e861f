"""Instances whose runs a test opens and closes: real ones over gRPC, and the simulation's, with one interface."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from headrace.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_servicekit.rpc.errors import message_of, reason_of
from headrace_simulation.fleet.instances import Instance
from headrace_simulation.fleet.network import SimulatedInstanceClient
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.fleet.trainer import Trainer
from typing_extensions import override

from harness.services.alone import CALL_S, Service, channel_to
from harness.services.fake_fleet import FakeFleet

MESSAGES: dict[str, Any] = {"rollout": rollout_pb2, "trainer": trainer_pb2, "reward": reward_pb2}
STUBS: dict[str, Any] = {
    "rollout": rollout_pb2_grpc.RolloutServiceStub,
    "trainer": trainer_pb2_grpc.TrainerServiceStub,
    "reward": reward_pb2_grpc.RewardServiceStub,
}
SIMULATED: dict[str, type[Instance]] = {"rollout": Rollout, "trainer": Trainer, "reward": Reward}
Report = tuple[str, int, str, int]
"""(run, open_id, phase, last command)."""


class Refused(Exception):
    """An instance refused a call."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class Subject(ABC):
    """One instance. `seed` makes configs differ; `limit` is how many runs it can have open, 0 for any number.

    `opened`: the runs that it was asked to open.
    """

    def __init__(self, kind: str, model: Path, directory: Path) -> None:
        self.kind = kind
        self.limit = 0 if kind == "reward" else 1
        self._model = model
        self._directory = directory
        self._sequence = 0
        self.opened: set[str] = set()

    def header(self, run: str, open_id: int, lease_epoch: int = 0) -> common_pb2.CommandHeader:
        """The next command's; `sequence` is its number."""
        self._sequence += 1
        return common_pb2.CommandHeader(
            run=run,
            coordinator_epoch=1,
            open_id=open_id,
            command_sequence=self._sequence,
            lease_epoch=lease_epoch,
        )

    @property
    def sequence(self) -> int:
        """Number of the last command."""
        return self._sequence

    def open(self, run: str, open_id: int, seed: int = 1) -> Any:
        """OpenRun."""
        self.opened.add(run)
        fields = {"run_directory": str(self._directory)} if self.kind == "trainer" else {}
        request = MESSAGES[self.kind].OpenRunRequest(
            header=self.header(run, open_id), config_json=json.dumps(self._config(seed)), **fields
        )
        return self.call("OpenRun", request)

    def close(self, run: str, open_id: int = 0) -> None:
        """CloseRun."""
        self.call("CloseRun", MESSAGES[self.kind].CloseRunRequest(header=self.header(run, open_id)))

    def command(self, run: str, open_id: int) -> Any:
        """A command to the run that needs no lease and no weights; a score for (0, 0) from a reward."""
        header = self.header(run, open_id)
        if self.kind == "rollout":
            return self.call("ListInventory", rollout_pb2.ListInventoryRequest(header=header))
        if self.kind == "trainer":
            return self.call("GetStepState", trainer_pb2.GetStepStateRequest(header=header))
        item = reward_pb2.ScoreItem(attempt=1, completion="1", reference="1")
        return self.stream("Score", reward_pb2.ScoreRequest(header=header, items=[item]))

    def _config(self, seed: int) -> dict[str, Any]:
        model = {"path": str(self._model), "dtype": "float32"}
        if self.kind == "rollout":
            return {"model": model, "rollout": {}, "seed": seed}
        if self.kind == "reward":
            return {"scorers": [{"name": "exact", "weight": float(seed)}]}
        parts: dict[str, Any] = {name: {} for name in ("optimizer", "trainer", "sampling", "checkpoint")}
        algorithm = {"group_size": 2, "prompts_per_step": 1}
        return {"model": model, "algorithm": algorithm, **parts, "seed": seed, "steps": 3}

    @abstractmethod
    def call(self, method: str, request: Any) -> Any:
        """A unary call; raises Refused."""

    @abstractmethod
    def stream(self, method: str, request: Any) -> list[Any]:
        """The responses to a stream of one request; raises Refused."""

    @abstractmethod
    def reports(self) -> list[Report]:
        """What the coordinator was told last."""

    # Leases

    @abstractmethod
    def grant(self, epoch: int) -> None:
        """Gives it a lease."""

    @abstractmethod
    def renew(self, epoch: int, *, renewed: bool) -> None:
        """Renews the lease, or lets its deadline pass."""

    @abstractmethod
    def revoked_while(self, method: str, request: Any, epoch: int) -> list[Any]:
        """Responses to a stream of one request that stays open; the lease is revoked after the first."""


class RealSubject(Subject):
    """A process, called over gRPC."""

    def __init__(self, kind: str, model: Path, directory: Path, fleet: FakeFleet, channel: Any) -> None:
        super().__init__(kind, model, directory)
        self._fleet = fleet
        self._stub = STUBS[kind](channel)

    @override
    def call(self, method: str, request: Any) -> Any:
        with _refusals():
            return getattr(self._stub, method)(request, timeout=CALL_S)

    @override
    def stream(self, method: str, request: Any) -> list[Any]:
        with _refusals():
            return list(getattr(self._stub, method)(iter([request]), timeout=CALL_S))

    @override
    def reports(self) -> list[Report]:
        return [_report(message) for message in self._fleet.reports(f"{self.kind}-0")]

    @override
    def grant(self, epoch: int) -> None:
        self._fleet.grant(f"{self.kind}-0", epoch)

    def renew(self, epoch: int, *, renewed: bool) -> None:
        """See `Subject.renew`; the lease's own time passes after this."""
        self._fleet.renews = renewed

    @override
    def revoked_while(self, method: str, request: Any, epoch: int) -> list[Any]:
        over = threading.Event()

        def requests() -> Iterator[Any]:
            yield request
            over.wait(CALL_S)

        try:
            responses = getattr(self._stub, method)(requests(), timeout=CALL_S)
            with _refusals():
                first = next(responses)
                self._fleet.revoke(f"{self.kind}-0", epoch)
                return [first, *responses]
        finally:
            over.set()


class SimulatedSubject(Subject):
    """An imaginary instance behind the simulation's network, without its faults."""

    def __init__(self, kind: str, model: Path, directory: Path, runner: asyncio.Runner) -> None:
        super().__init__(kind, model, directory)
        self._runner = runner
        self._instance = SIMULATED[kind](f"{kind}-0", f"{kind}-0#1", random.Random(1))
        self._port = SimulatedInstanceClient(self._instance, random.Random(2), False)

    @override
    def call(self, method: str, request: Any) -> Any:
        with _refusals():
            return self._runner.run(self._port.call(method, request, CALL_S))

    @override
    def stream(self, method: str, request: Any) -> list[Any]:

        async def requests() -> AsyncIterator[Any]:
            yield request

        async def collect() -> list[Any]:
            return [response async for response in self._port.stream(method, requests(), CALL_S)]

        with _refusals():
            return self._runner.run(collect())

    @override
    def reports(self) -> list[Report]:
        return [_report(message) for message in self._instance.open_runs.reports()]

    @override
    def grant(self, epoch: int) -> None:
        self._instance.held[epoch] = ()
        self._instance.granted()
        self.renew(epoch, renewed=True)

    @override
    def renew(self, epoch: int, *, renewed: bool) -> None:
        self._instance.deadlines[epoch] = math.inf if renewed else 0.0

    @override
    def revoked_while(self, method: str, request: Any, epoch: int) -> list[Any]:

        async def requests() -> AsyncIterator[Any]:
            yield request
            await asyncio.sleep(CALL_S)

        async def collect() -> list[Any]:
            responses = self._port.stream(method, requests(), CALL_S)
            first = await anext(responses)
            self._instance.revoke(epoch)
            return [first, *[response async for response in responses]]

        with _refusals():
            return self._runner.run(asyncio.wait_for(collect(), CALL_S))


@contextmanager
def real(kind: str, model: Path, directory: Path, lease_ttl_s: int = 600) -> Iterator[Subject]:
    """A service's process with a session to a fleet."""
    with FakeFleet(lease_ttl_s=lease_ttl_s) as fleet:
        flags = ("--coordinator", fleet.address, "--name", f"{kind}-0", "--drain-grace-s", "0")
        with Service(kind, directory / kind, *flags) as service, channel_to(service.address) as channel:
            subject = RealSubject(kind, model, directory / "run", fleet, channel)
            subject.reports()  # waits for the session
            assert fleet.registered[f"{kind}-0"].max_open_runs == subject.limit
            yield subject


@contextmanager
def simulated(kind: str, model: Path, directory: Path, lease_ttl_s: int = 600) -> Iterator[Subject]:
    """An imaginary instance."""
    with asyncio.Runner() as runner:
        subject = SimulatedSubject(kind, model, directory, runner)
        assert subject._instance.open_runs.limit == subject.limit
        yield subject


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except CallRefused as refused:
        raise Refused(refused.reason, refused.message) from refused
    except grpc.RpcError as error:
        raise Refused(reason_of(error) or str(error), message_of(error)) from error


def _report(message: common_pb2.OpenRunReport) -> Report:
    phase = common_pb2.OpenPhase.Name(message.phase).removeprefix("OPEN_PHASE_")
    return message.run, message.open_id, phase, message.last_command
