"""An instance that nobody reaches: the coordinator listens for it, and callers come through the instance's own call."""

import asyncio

import grpc
import pytest
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.relay import listen_for
from headrace_servicekit.rpc.server import GrpcServer

FLEET, REWARD = "headrace.coordinator.v1.FleetService", "headrace.reward.v1.RewardService"


class Relaying(fleet_pb2_grpc.FleetServiceServicer):
    """A coordinator that listens for instances as the real one does, and knows nothing else."""

    def __init__(self, epoch=1):
        self.epoch, self.calls, self.registered = epoch, 0, []

    async def Register(self, request, context):
        self.registered.append(request)
        return fleet_pb2.RegisterResponse(coordinator_epoch=self.epoch)

    async def Relay(self, request_iterator, context):
        self.calls += 1
        async for response in listen_for(request_iterator, "127.0.0.1"):
            yield response


async def serving(fleet, listen="127.0.0.1:0"):
    server = GrpcServer(listen, token=None, instance="coordinator")
    server.add_service(fleet_pb2_grpc.add_FleetServiceServicer_to_server, fleet, FLEET)
    return server, await server.start()


@pytest.fixture
async def relayed(tmp_path, scripted_reward):
    """The fleet, its server and an instance that only dials."""
    fleet = Relaying()
    server, address = await serving(fleet)
    config = InstanceConfig(kind="reward", coordinator=address, outgoing=True, shm_dir=tmp_path / "shm")
    instance = Instance(config)
    instance.add_service(reward_pb2_grpc.add_RewardServiceServicer_to_server, scripted_reward, REWARD)
    await instance.start()
    yield fleet, server, instance
    await instance.stop(0.5)
    await server.drain(0)


async def asked(address):
    async with dial(address, token=None) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        return await stub.OpenRun(reward_pb2.OpenRunRequest(), timeout=20)


async def test_callers_come_through_the_coordinator_many_at_once_and_with_much(relayed, until):
    fleet, _, instance = relayed
    request = await until(lambda: fleet.registered and fleet.registered[0], "the registration")
    assert request.address == instance.address
    assert all([await each for each in [asked(request.address) for _ in range(8)]])
    async with dial(request.address, token=None) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        body = "x" * (24 << 20)  # in hundreds of pieces
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.OpenRun(reward_pb2.OpenRunRequest(config_json=f"refuse:{body}"), timeout=60)
        assert refused.value.code() in (
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )


async def test_a_relay_that_broke_comes_back_at_the_same_address(relayed, until):
    fleet, server, instance = relayed
    request = await until(lambda: fleet.registered and fleet.registered[0], "the registration")
    await server.drain(0)  # the coordinator is started anew
    again = Relaying(epoch=2)
    other, _ = await serving(again, server_address(instance))
    try:
        second = await until(lambda: again.registered and again.registered[0], "the registration there")
        await until(lambda: again.calls, "a relay there")
        assert second.address == request.address and second.incarnation == request.incarnation

        async def answered():
            try:
                return await asked(request.address)
            except grpc.aio.AioRpcError:
                return None

        async with asyncio.timeout(60):
            while not await answered():  # noqa: ASYNC110 - another process's word
                await asyncio.sleep(0.1)
    finally:
        await other.drain(0)


def server_address(instance):
    return instance.config.coordinator
