"""dial(): deadlines and retries by default."""

import json
import sys

import grpc
import pytest
from headrace.reward.v1 import reward_pb2
from headrace_servicekit.rpc import client

UNARY_DEADLINE_PROBE = """
import asyncio, sys
from headrace_servicekit.rpc import client
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
client.disable_deadlines()
async def main():
    async with client.dial(sys.argv[1], token=None) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        await stub.OpenRun(reward_pb2.OpenRunRequest(config_json="sleep:0.3"), timeout=0.1)
asyncio.run(main())
"""


async def test_a_unary_call_has_a_deadline_unless_it_names_one(servers, reward_stub, scripted_reward):
    _, address = await servers(scripted_reward)
    stub = reward_stub(address)
    await stub.OpenRun(reward_pb2.OpenRunRequest())
    await stub.OpenRun(reward_pb2.OpenRunRequest(), timeout=5)
    by_default, named = scripted_reward.deadlines
    assert 50 < by_default <= 60.5 and 3 < named <= 5.5


async def test_a_deadline_ends_a_call(servers, reward_stub, scripted_reward):
    _, address = await servers(scripted_reward)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reward_stub(address).OpenRun(reward_pb2.OpenRunRequest(config_json="sleep:30"), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_deadlines_can_be_switched_off_for_a_process(servers, scripted_reward, processes, until):
    _, address = await servers(scripted_reward)
    probe = processes([sys.executable, "-c", UNARY_DEADLINE_PROBE, address])
    await until(lambda: probe.poll() is not None, "the probe to end", 30)
    assert probe.returncode == 0
    assert scripted_reward.deadlines[0] is None


async def test_unary_calls_are_retried_while_the_server_is_unavailable(servers, reward_stub, scripted_reward):
    _, address = await servers(scripted_reward)
    response = await reward_stub(address).OpenRun(reward_pb2.OpenRunRequest(config_json="unavailable:2"))
    assert response.scorer_digest == "done" and scripted_reward.opened == 3


async def test_other_codes_are_not_retried(servers, reward_stub, scripted_reward):
    _, address = await servers(scripted_reward)
    with pytest.raises(grpc.aio.AioRpcError):
        await reward_stub(address).OpenRun(reward_pb2.OpenRunRequest(config_json="refuse:BUSY"))
    assert scripted_reward.opened == 1


async def test_messages_of_many_mebibytes_pass_and_larger_ones_do_not(servers, reward_stub, scripted_reward):
    _, address = await servers(scripted_reward)
    stub = reward_stub(address)
    await stub.OpenRun(reward_pb2.OpenRunRequest(config_json="x" * (20 << 20)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.OpenRun(reward_pb2.OpenRunRequest(config_json="x" * (65 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_only_unary_methods_are_in_the_retry_policy():
    (config,) = json.loads(client.service_config())["methodConfig"]
    methods = {f"{name['service']}/{name['method']}" for name in config["name"]}
    assert "headrace.trainer.v1.TrainerService/CommitStep" in methods
    for stream in ("trainer.v1.TrainerService/Learn", "coordinator.v1.FleetService/Session"):
        assert f"headrace.{stream}" not in methods
    assert config["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]


async def test_a_refusal_is_what_a_writer_reads_when_its_next_write_comes_too_late(
    servers, reward_stub, scripted_reward
):
    _, address = await servers(scripted_reward)
    stub = reward_stub(address)
    refused = reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(attempt=13)])
    later = reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(completion="x" * 65536)])

    async def requests():
        yield refused
        for _ in range(40):
            yield later

    codes = set()
    for _ in range(50):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Score(requests()):
                pass
        codes.add(caught.value.code())
    assert codes == {grpc.StatusCode.NOT_FOUND}
