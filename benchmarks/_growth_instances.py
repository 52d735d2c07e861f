"""Imaginary instances behind real gRPC servers for `growth.py`: `python _growth_instances.py COORDINATOR`.

The simulation's rollout, trainer and reward, which take no time, never fail and keep nothing of a past step.
Measures nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from headrace.common.v1 import common_pb2
from headrace.coordinator.v1 import fleet_pb2 as fleet
from headrace.coordinator.v1 import fleet_pb2_grpc
from headrace.reward.v1 import reward_pb2 as reward
from headrace.reward.v1 import reward_pb2_grpc
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.rollout.v1 import rollout_pb2_grpc
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace.trainer.v1 import trainer_pb2_grpc
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from headrace_simulation.fleet.instances import Instance
from headrace_simulation.fleet.reward import Reward
from headrace_simulation.fleet.rollout import Rollout
from headrace_simulation.fleet.trainer import Trainer

HEARTBEAT_S = 2.0
CONCURRENCY = 128
FOR_EVER = float("inf")
CAPABILITIES = {
    "rollout": {"engines": ["transformers"], "algorithms": ["grpo"]},
    "trainer": {"backends": ["fsdp"], "algorithms": ["grpo"], "trainer_backends": ["fsdp"]},
    "reward": {"scorers": ["exact"]},
}


class Steady(random.Random):
    """No delay and no fault."""

    def uniform(self, a: float, b: float) -> float:
        """Nothing takes time."""
        return 0.0

    def random(self) -> float:
        """Nothing fails."""
        return 1.0

    def shuffle(self, x: Any) -> None:
        """Order stays."""


class QuickRollout(Rollout):
    """A rollout that answers an assignment at once and in one message, as a busy engine's chunks come."""

    async def OpenRun(self, request: rollout.OpenRunRequest) -> rollout.OpenRunResponse:
        """As the simulation's, with room for a step."""
        await super().OpenRun(request)
        return rollout.OpenRunResponse(max_concurrency=CONCURRENCY, max_context_tokens=512)

    async def Generate(
        self, requests: AsyncIterator[rollout.GenerateRequest]
    ) -> AsyncIterator[rollout.GenerateResponse]:
        """One response for each assignment."""
        opening = (await anext(aiter(requests))).open
        self.fence(opening.header, lease=True)
        request: rollout.GenerateRequest
        async for request in self.while_open(opening.header.run, requests):
            done: asyncio.Queue[common_pb2.Trajectory | rollout.PartialSample] = asyncio.Queue()
            for group in request.assign.groups:
                for sample in group.samples:
                    await self._make(opening, group, sample, done)
            response = rollout.GenerateResponse()
            while not done.empty():
                body = done.get_nowait()
                response.chunks.add(sample=body.sample, attempt=body.attempt, finished=body)
            yield response


class QuickReward(Reward):
    """A reward service that answers a request in one message."""

    async def Score(
        self, requests: AsyncIterator[reward.ScoreRequest]
    ) -> AsyncIterator[reward.ScoreResponse]:
        """Rewards that depend on the slot alone."""
        async for request in requests:
            response = reward.ScoreResponse()
            for item in request.items:
                value = float((item.sample.prompt_ordinal + item.sample.sample_index) % 2)
                response.results.add(
                    sample=item.sample,
                    attempt=item.attempt,
                    status=reward.SCORE_STATUS_OK,
                    reward=value,
                    evaluation=item.evaluation,
                    stage=item.stage,
                )
            yield response


class QuickTrainer(Trainer):
    """A trainer without weights, that keeps two checkpoints and answers a message with one."""

    async def Learn(
        self, requests: AsyncIterator[trainer.LearnRequest]
    ) -> AsyncIterator[trainer.LearnResponse]:
        """Takes every group."""
        async for request in requests:
            self.fence(request.header, lease=True)
            outcomes = [self._accumulate(request, group) for group in request.groups]
            yield trainer.LearnResponse(outcomes=outcomes)

    def _hold(self, weights: Any, number: int, parent: int, ordinal: int) -> None:
        super()._hold((), number, parent, ordinal)
        self.made.clear()
        del self.disk.checkpoints[:-2]


KINDS: list[tuple[type[Instance], Any, Any, fleet.ServiceKind]] = [
    (
        QuickRollout,
        rollout_pb2_grpc.RolloutServiceServicer,
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
        fleet.SERVICE_KIND_ROLLOUT,
    ),
    (
        QuickTrainer,
        trainer_pb2_grpc.TrainerServiceServicer,
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
        fleet.SERVICE_KIND_TRAINER,
    ),
    (
        QuickReward,
        reward_pb2_grpc.RewardServiceServicer,
        reward_pb2_grpc.add_RewardServiceServicer_to_server,
        fleet.SERVICE_KIND_REWARD,
    ),
]


def servicer_of(instance: Instance, base: Any) -> Any:
    """The contract's servicer that lets an imaginary instance answer."""
    methods: dict[str, Any] = {}
    for name in [name for name in vars(base) if hasattr(instance, name)]:
        streams = inspect.isasyncgenfunction(getattr(instance, name))
        methods[name] = _stream(instance, name) if streams else _unary(instance, name)
    return type("Imaginary", (base,), methods)()


def _unary(instance: Instance, name: str) -> Any:
    async def call(self: Any, request: Any, context: Any) -> Any:
        try:
            return await instance.handle(name, request)
        except CallRefused as refused:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION, refused.reason, refused.message
            ) from refused

    return call


def _stream(instance: Instance, name: str) -> Any:
    async def one(request: Any) -> AsyncIterator[Any]:
        yield request

    async def call(self: Any, requests: Any, context: Any) -> AsyncIterator[Any]:
        source = requests if hasattr(requests, "__aiter__") else one(requests)
        try:
            async for response in instance.handle_stream(name, source):
                yield response
        except CallRefused as refused:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION, refused.reason, refused.message
            ) from refused

    return call


async def live(instance: Instance, kind: fleet.ServiceKind, address: str, coordinator: str) -> None:
    """Registers, then keeps a session; again whenever the coordinator was away."""
    while True:
        try:
            async with grpc.aio.insecure_channel(coordinator) as channel:
                stub = fleet_pb2_grpc.FleetServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
                await _register(instance, kind, address, stub)
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.2)


async def _register(instance: Instance, kind: fleet.ServiceKind, address: str, stub: Any) -> None:
    capabilities = {
        facet: fleet.StringList(values=names) for facet, names in CAPABILITIES[instance.KIND].items()
    }
    await stub.Register(
        fleet.RegisterRequest(
            instance=instance.name,
            incarnation=instance.incarnation,
            kind=kind,
            host="imaginary",
            address=address,
            devices=instance.devices,
            capabilities=capabilities,
            held_leases=[common_pb2.Lease(epoch=epoch) for epoch in instance.held],
            coordinator_epoch=instance.coordinator_epoch,
        )
    )
    outbox: asyncio.Queue[fleet.SessionRequest] = asyncio.Queue()
    beating = asyncio.create_task(_beat(instance, outbox))
    try:
        async for message in stub.Session(_drain(outbox)):
            _obey(instance, message, outbox)
    finally:
        beating.cancel()


async def _beat(instance: Instance, outbox: asyncio.Queue[fleet.SessionRequest]) -> None:
    sequence = 0
    while True:
        sequence += 1
        beat = fleet.Heartbeat(
            sequence=sequence, lease_epochs=list(instance.held), open_runs=instance.open_runs.reports()
        )
        outbox.put_nowait(fleet.SessionRequest(incarnation=instance.incarnation, heartbeat=beat))
        await asyncio.sleep(HEARTBEAT_S)


async def _drain(outbox: asyncio.Queue[fleet.SessionRequest]) -> AsyncIterator[fleet.SessionRequest]:
    while True:
        yield await outbox.get()


def _obey(
    instance: Instance, message: fleet.SessionResponse, outbox: asyncio.Queue[fleet.SessionRequest]
) -> None:
    match message.WhichOneof("command"):
        case "grant":
            lease = message.grant.lease
            instance.held[lease.epoch] = tuple(lease.devices)
            instance.deadlines[lease.epoch] = FOR_EVER
            held = fleet.LeaseHeld(epoch=lease.epoch)
            outbox.put_nowait(fleet.SessionRequest(incarnation=instance.incarnation, lease_held=held))
        case "revoke":
            instance.held.pop(message.revoke.epoch, None)
            released = fleet.LeaseReleased(epoch=message.revoke.epoch)
            outbox.put_nowait(fleet.SessionRequest(incarnation=instance.incarnation, lease_released=released))
        case "heartbeat_ack":
            for epoch in message.heartbeat_ack.stale_epochs:
                instance.held.pop(epoch, None)


async def main(coordinator: str) -> None:
    """Serves for ever."""
    servers: list[GrpcServer] = []  # gRPC ends a server that nobody refers to
    async with asyncio.TaskGroup() as tasks:
        for index, (made, base, add, kind) in enumerate(KINDS):
            name = f"{made.KIND}-0"
            devices = (f"imaginary/cpu:{index}",) if made.KIND != "reward" else ()
            instance = made(name, f"{name}#1", Steady(), devices)
            instance.pace = 0.0
            server = GrpcServer("127.0.0.1:0", token=None, instance=name)
            servers.append(server)
            server.add_service(add, servicer_of(instance, base), f"imaginary.{name}")
            tasks.create_task(live(instance, kind, await server.start(), coordinator))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
