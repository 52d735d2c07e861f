"""The coordinator's client of an instance, against a real server: what ends a stream is told."""

import pytest
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_coordinator.fleet.grpc_client import GrpcInstanceClient
from headrace_servicekit.rpc.server import GrpcServer

HEADER = common_pb2.CommandHeader(run="runs/r-1")


class Scorer(reward_pb2_grpc.RewardServiceServicer):
    """Answers each message at once."""

    async def Score(self, request_iterator, context):
        async for _ in request_iterator:
            yield reward_pb2.ScoreResponse()


@pytest.fixture
async def client():
    server = GrpcServer("127.0.0.1:0", token=None)
    server.add_service(
        reward_pb2_grpc.add_RewardServiceServicer_to_server, Scorer(), "headrace.reward.v1.RewardService"
    )
    yield GrpcInstanceClient("reward", await server.start(), "reward-x", None)
    await server.drain(0)


async def test_an_error_in_what_is_sent_is_the_stream_s_own(client):
    """gRPC logs it for nobody and cancels the call: the run would seem to be cancelled, or to wait for an answer."""

    async def sent():
        yield reward_pb2.ScoreRequest(header=HEADER)
        raise LookupError("item 7 has no field 'question'")

    with pytest.raises(LookupError, match="item 7"):
        async for _ in client.stream("Score", sent(), 10):
            pass


async def test_a_stream_whose_server_is_away_is_down(client):
    away = GrpcInstanceClient("reward", "127.0.0.1:1", "reward-y", None)
    with pytest.raises(Exception, match="UNAVAILABLE"):
        async for _ in away.stream("Score", iter_one(), 10):
            pass


async def iter_one():
    yield reward_pb2.ScoreRequest(header=HEADER)
