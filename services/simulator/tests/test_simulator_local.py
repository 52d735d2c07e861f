"""Steps over the socket of the host: what is refused, what breaks, and when gRPC is taken in its place."""

from __future__ import annotations

import asyncio
import logging
import os

import grpc
import pytest
from headrace.simulator.v1 import simulator_pb2, simulator_pb2_grpc
from headrace_servicekit.process.local import join, nearest
from headrace_servicekit.process.worker_pipes import LENGTH, frame
from headrace_servicekit.rpc.client import MAX_MESSAGE_BYTES, dial
from headrace_servicekit.rpc.errors import message_of, reason_of
from headrace_servicekit.rpc.server import GrpcServer
from headrace_simulator.service import SimulatorServicer

OK = simulator_pb2.OUTCOME_STATUS_OK


@pytest.fixture
def locally() -> bool:
    return True


@pytest.fixture
async def pool(simulator):
    return await simulator.open("CartPole-v1")


def offered(pool):
    return pool.stub.StepLocally(simulator_pb2.StepLocallyRequest(pool=pool.opened.pool), timeout=60)


async def refusal(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


async def test_refusals_are_those_of_the_grpc_stream(pool):
    two = [pool.reset_operation(0), pool.reset_operation(0)]
    stale = pool.request(pool.reset_operation(0))
    stale.header.coordinator_epoch = 1 << 40
    for wrong in (
        pool.request(pool_incarnation="past"),
        pool.request(pool="none"),
        pool.request(*two),
        stale,
    ):
        found = []
        for call in (await pool.stream(), pool.stub.Step(timeout=60)):
            await call.write(wrong)
            error = await refusal(call)
            found.append((error.code(), message_of(error), reason_of(error)))
        assert found[0] == found[1]
    none = simulator_pb2.StepLocallyRequest(pool="none")
    assert reason_of(await refusal(pool.stub.StepLocally(none, timeout=60))) == "NOT_FOUND"
    assert (await pool.reset()).status == OK


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (LENGTH.pack(16) + b"half", "BROKEN_FRAME"),
        (b"\x01", "BROKEN_FRAME"),
        (LENGTH.pack(MAX_MESSAGE_BYTES + 1), "BROKEN_FRAME"),
        (LENGTH.pack(0), "BROKEN_FRAME"),
        (frame(b"\xff\xff\xff"), "UNDECODABLE"),
    ],
)
async def test_a_caller_that_dies_inside_a_frame_or_sends_none_ends_its_own_stream_alone(pool, sent, reason):
    other = await pool.stream()
    call = offered(pool)
    answer = await call.read()
    stream = await join(answer.socket_path, answer.ticket)
    await stream.write(pool.request(pool.reset_operation(0)).SerializeToString())
    assert simulator_pb2.StepResponse.FromString(await stream.read()).outcomes[0].status == OK
    stream._writer.write(sent)
    stream.end()
    assert reason_of(await refusal(call)) == reason
    assert await stream.read() is None, "the server closes its end"
    await other.write(pool.request(pool.action_operation(1, index=1)))
    assert (await other.read()).outcomes[0].status == OK
    other.cancel()


async def test_a_ticket_lets_one_caller_join_once(pool):
    call = offered(pool)
    answer = await call.read()
    with pytest.raises(OSError, match="not the socket of the process"):
        await join(answer.socket_path, bytes(16))
    stream = await join(answer.socket_path, answer.ticket)
    with pytest.raises(OSError, match="not the socket of the process"):
        await join(answer.socket_path, answer.ticket)
    await stream.write(pool.request(pool.reset_operation(0)).SerializeToString())
    assert await stream.read()
    call.cancel()
    assert await stream.read() is None, "the stream ends with its call"


async def test_nobody_is_offered_a_socket_without_the_token(pool, instance):
    server = GrpcServer("127.0.0.1:0", token="the fleet's")
    (servicer,) = [each for _, each, _ in instance._services if isinstance(each, SimulatorServicer)]
    server.add_service(simulator_pb2_grpc.add_SimulatorServiceServicer_to_server, servicer, "simulator")
    address = await server.start()
    for token, code in (("another", grpc.StatusCode.UNAUTHENTICATED), ("the fleet's", None)):
        async with dial(address, token=token) as channel:
            stub = simulator_pb2_grpc.SimulatorServiceStub(channel)
            call = stub.StepLocally(simulator_pb2.StepLocallyRequest(pool=pool.opened.pool), timeout=60)
            if code is None:
                assert (await call.read()).ticket
            else:
                assert (await refusal(call)).code() is code
            call.cancel()
    await server.drain(0.1)


async def no_socket(path):
    path.unlink()


async def somebody_elses_socket(path):
    path.unlink()

    async def came(reader, writer):
        writer.close()

    # Bound by a short path: the kernel allows 107 bytes.
    folder = os.open(path.parent, os.O_PATH)
    await asyncio.start_unix_server(came, f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


@pytest.mark.parametrize(
    ("change", "why"), [(no_socket, "No such file"), (somebody_elses_socket, "not the socket of the process")]
)
async def test_a_caller_that_cannot_reach_the_socket_goes_by_grpc_and_says_why(
    pool, instance, caplog, change, why
):
    await change(instance.weights.directory / "streams")
    with caplog.at_level(logging.INFO, "headrace_servicekit.process.local"):
        call = await nearest(offered(pool), pool.stub.Step, simulator_pb2.StepResponse.FromString)
    (line,) = [each for each in caplog.records if each.message == "a stream goes by gRPC"]
    assert why in line.why
    await call.write(pool.request(pool.reset_operation(0)))
    assert (await call.read()).outcomes[0].status == OK
    call.cancel()
