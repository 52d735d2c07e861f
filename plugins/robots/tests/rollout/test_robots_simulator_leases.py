"""One stream of steps serves under one lease of the simulator after another."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from episode_rig import PENDULUM, new_policy, open_robot, run_episodes, starts
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.rpc.tensors import encode_tensor
from rollout_calls import RUN


class Scripted(simulator_pb2_grpc.SimulatorServiceServicer):
    """Episodes of one step; notes under which lease each stream is told to act, and obeys `held` alone."""

    def __init__(self) -> None:
        self.streams: list[list[int]] = []
        self.held = 0

    async def StepLocally(
        self, request: simulator_pb2.StepLocallyRequest, context: object
    ) -> AsyncIterator[simulator_pb2.StepLocallyResponse]:
        yield simulator_pb2.StepLocallyResponse(why_not="it is scripted")

    async def Step(
        self, requests: AsyncIterator[simulator_pb2.StepRequest], context: object
    ) -> AsyncIterator[simulator_pb2.StepResponse]:
        told: list[int] = []
        self.streams.append(told)
        async for request in requests:
            if request.HasField("header"):
                told.append(request.header.lease_epoch)
            refused = told[-1] != self.held
            yield simulator_pb2.StepResponse(
                outcomes=[_outcome(operation, refused) for operation in request.operations]
            )


def _outcome(operation, refused):
    outcome = simulator_pb2.EnvironmentOutcome(
        environment=operation.environment, step_index=operation.step_index
    )
    if refused:
        outcome.status, outcome.detail = simulator_pb2.OUTCOME_STATUS_REVOKED, "another lease is held"
        return outcome
    outcome.status = simulator_pb2.OUTCOME_STATUS_OK
    outcome.observation[""].CopyFrom(encode_tensor(np.zeros(3, np.float32)))
    if not operation.HasField("reset"):
        outcome.terminated = True
        outcome.rewards.CopyFrom(encode_tensor(np.ones(1, np.float32)))
        outcome.successes.CopyFrom(encode_tensor(np.ones(1, np.bool_)))
    return outcome


@pytest.fixture
async def scripted():
    server, servicer = grpc.aio.server(), Scripted()
    simulator_pb2_grpc.add_SimulatorServiceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


def pool(address: str, epoch: int) -> rollout_pb2.EnvironmentPool:
    header = common_pb2.CommandHeader(run=RUN, coordinator_epoch=1, open_id=1, lease_epoch=epoch)
    return rollout_pb2.EnvironmentPool(
        address=address, header=header, pool="pools/1", pool_incarnation="i", count=2, task="Pendulum-v1"
    )


async def test_a_pool_is_told_each_new_lease_once_and_keeps_its_stream(new_rollout, publish, scripted):
    rollout = await new_rollout()
    await open_robot(rollout, PENDULUM)
    await rollout.install(publish(new_policy(), 1))
    for epoch, ordinals in ((5, range(4)), (5, range(4, 8)), (9, range(8, 12))):
        scripted.held = epoch
        call = await run_episodes(rollout, [pool(scripted.address, epoch)], starts(ordinals))
        assert len(await call.read_all()) == 4 and not call.lost
    assert scripted.streams == [[5, 9]]


async def test_a_lease_that_is_over_costs_the_pool_and_no_sample(new_rollout, publish, scripted):
    rollout = await new_rollout()
    await open_robot(rollout, PENDULUM)
    await rollout.install(publish(new_policy(), 1))
    scripted.held = 6
    call = await run_episodes(rollout, [pool(scripted.address, 5)], starts(range(4)))
    assert not await call.read_all()
    assert call.lost == ["pools/1"] and len(call.partials) == 4
