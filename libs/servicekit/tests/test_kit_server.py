"""The server: who may call, what errors look like, how it ends."""

import asyncio
import logging
import socket
import ssl
import urllib.error
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2
from headrace_servicekit.lease.fence import Fence
from headrace_servicekit.rpc.addresses import (
    advertised_host,
    free_port,
    host_port,
    is_loopback,
    split_address,
)
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of, metadata_of, reason_of
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.rpc.tls import AUTHORITY

REWARD = "headrace.reward.v1.RewardService"


def opening(script=""):
    return reward_pb2.OpenRunRequest(config_json=script, header=common_pb2.CommandHeader(run="runs/r1"))


async def failure(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def health_of(address, service=""):
    async with dial(address, token=None) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service)
        )
        return response.status


async def test_only_the_token_opens_a_service_and_health_needs_none(servers, reward_stub, scripted_reward):
    _, address = await servers(scripted_reward, token="secret")
    await reward_stub(address, "secret").OpenRun(opening())
    for token in (None, "secreT", "secret2", ""):
        error = await failure(reward_stub(address, token).OpenRun(opening()))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED and reason_of(error) == "UNAUTHENTICATED"
    assert scripted_reward.opened == 1
    assert await health_of(address, REWARD) == health_pb2.HealthCheckResponse.SERVING


async def test_streams_need_the_token_too(servers, reward_stub, scripted_reward):
    _, address = await servers(scripted_reward, token="secret")
    call = reward_stub(address, "wrong").Score(iter([reward_pb2.ScoreRequest()]))
    assert (await failure(call.read())).code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_service_error_arrives_with_code_reason_sentence_and_metadata(
    servers, reward_stub, scripted_reward
):
    _, address = await servers(scripted_reward)
    error = await failure(reward_stub(address).OpenRun(opening("refuse:NOT_OPEN")))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (reason_of(error), message_of(error), metadata_of(error)) == (
        "NOT_OPEN",
        "not now; later",
        {"key": "k"},
    )


async def test_a_service_error_inside_a_stream_arrives_after_what_was_sent(
    servers, reward_stub, scripted_reward
):
    _, address = await servers(scripted_reward)
    items = [reward_pb2.ScoreItem(attempt=attempt) for attempt in (1, 13)]
    call = reward_stub(address).Score(iter([reward_pb2.ScoreRequest(items=items)]))
    assert (await call.read()).results[0].attempt == 1
    assert reason_of(await failure(call.read())) == "NOT_FOUND"


async def test_an_unexpected_exception_is_a_sentence_for_the_caller_and_a_traceback_in_the_log(
    servers, reward_stub, scripted_reward, caplog
):
    _, address = await servers(scripted_reward)
    with caplog.at_level(logging.ERROR):
        error = await failure(reward_stub(address).OpenRun(opening("crash:oops")))
    assert error.code() is grpc.StatusCode.INTERNAL and reason_of(error) == "INTERNAL"
    assert "ValueError: oops" in message_of(error) and "log of test" in message_of(error)
    assert any(record.exc_info for record in caplog.records)


def test_errors_without_a_reason_have_none():
    assert reason_of(ValueError("x")) is None and message_of(ValueError("x")) == "x"
    assert reason_of(ServiceError(grpc.StatusCode.ABORTED, "BUSY", "later")) == "BUSY"


async def test_beyond_loopback_there_must_be_a_certificate_and_a_token(certified):
    with pytest.raises(ServiceError, match="HEADRACE_TLS_DIR") as refused:
        await GrpcServer("0.0.0.0:0", token="secret").start()
    assert refused.value.reason == "CERTIFICATE_REQUIRED"
    certified()
    with pytest.raises(ServiceError, match="HEADRACE_TOKEN_FILE") as refused:
        await GrpcServer("0.0.0.0:0", token=None).start()
    assert refused.value.reason == "TOKEN_REQUIRED"
    server = GrpcServer("0.0.0.0:0", token="secret")
    await server.start()
    await server.drain(0)


async def test_a_port_in_use_is_named(servers, scripted_reward):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServiceError, match=address) as caught:
            await servers(scripted_reward, listen=address)
        assert caught.value.reason == "ADDRESS_IN_USE"


async def test_two_servers_never_share_a_port(servers, scripted_reward):
    _, address = await servers(scripted_reward)
    with pytest.raises(ServiceError, match="in use"):
        await servers(scripted_reward, listen=address)


async def test_draining_refuses_new_calls_and_lets_running_ones_end(
    servers, reward_stub, scripted_reward, until
):
    server, address = await servers(scripted_reward)
    stub = reward_stub(address)
    running = asyncio.ensure_future(stub.OpenRun(opening("hold")))
    await until(lambda: scripted_reward.opened == 1, "the call to start")
    draining = asyncio.ensure_future(server.drain(30))
    await asyncio.sleep(0.1)
    assert await health_of(address, REWARD) == health_pb2.HealthCheckResponse.NOT_SERVING
    refused = asyncio.ensure_future(failure(stub.ListScorers(reward_pb2.ListScorersRequest(), timeout=30)))
    await asyncio.sleep(0.1)
    scripted_reward.go_on.set()
    assert (await running).scorer_digest == "done"
    await draining
    assert (await refused).code() is grpc.StatusCode.UNAVAILABLE


async def test_draining_ends_after_its_grace(servers, reward_stub, scripted_reward, until):
    server, address = await servers(scripted_reward)
    running = asyncio.ensure_future(failure(reward_stub(address).OpenRun(opening("sleep:60"))))
    await until(lambda: scripted_reward.opened == 1, "the call to start")
    await asyncio.wait_for(server.drain(0.2), 20)
    assert (await running).code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)


async def test_reflection_is_there_when_asked(servers, scripted_reward):
    for wanted in (True, False):
        _, address = await servers(scripted_reward, reflection=wanted)
        async with dial(address, token=None) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            if wanted:
                names = [service.name for service in (await call.read()).list_services_response.service]
                assert REWARD in names
            else:
                assert (await failure(call.read())).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_figures_count_calls_by_method_and_code(servers, reward_stub, scripted_reward):
    port = free_port()
    _, address = await servers(scripted_reward, metrics_port=port)
    stub = reward_stub(address)
    await stub.OpenRun(opening())
    await failure(stub.OpenRun(opening("refuse:BUSY")))
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read())
    method = f'method="/{REWARD}/OpenRun"'
    for code in ("OK", "FAILED_PRECONDITION"):
        assert f'headrace_rpcs_total{{code="{code}",instance="test",{method}}}'.encode() in page
    with pytest.raises(ServiceError, match=f"metrics port {port}"):
        await servers(scripted_reward, metrics_port=port)


@pytest.mark.parametrize(("listen", "status"), [("127.0.0.1:0", 200), ("0.0.0.0:0", 401)])
@pytest.mark.parametrize("shown", ["", "wrong", "secret"])
async def test_figures_beyond_the_loopback_want_the_token(
    servers, scripted_reward, certified, tmp_path, listen, status, shown
):
    certified()
    port = free_port()
    await servers(scripted_reward, token="secret", listen=listen, metrics_port=port)
    headers = {"Authorization": f"Bearer {shown}"} if shown else {}
    scheme = "https" if status == 401 else "http"
    asked = urllib.request.Request(f"{scheme}://127.0.0.1:{port}/metrics", headers=headers)
    context = ssl.create_default_context(cafile=tmp_path / "tls" / AUTHORITY)
    context.check_hostname = False
    try:
        found = (await asyncio.to_thread(urllib.request.urlopen, asked, context=context)).status
    except urllib.error.HTTPError as error:
        found = error.code
    assert found == (200 if shown == "secret" else status)


def test_addresses():
    assert split_address("[::1]:80") == ("::1", "80")
    assert [split_address(each, default_port=7) for each in ("::1", "[::1]", "h", "[::1]:8")] == [
        ("::1", "7"),
        ("::1", "7"),
        ("h", "7"),
        ("::1", "8"),
    ]
    assert host_port("::1", 80) == "[::1]:80" and host_port("h", 80) == "h:80"
    assert is_loopback("127.3.0.1") and is_loopback("localhost") and is_loopback("::1")
    assert not is_loopback("0.0.0.0") and not is_loopback("example.org")
    assert advertised_host("127.0.0.1:0", "") == "127.0.0.1"
    assert advertised_host("0.0.0.0:0", "me") == "me"
    assert advertised_host("0.0.0.0:0", "") == socket.gethostname()
    with pytest.raises(ServiceError, match="host:port"):
        split_address("50051")


@pytest.mark.parametrize("method", ["unary_unary", "stream_stream"])
async def test_bytes_that_do_not_decode_are_refused_in_one_line(servers, scripted_reward, caplog, method):
    _, address = await servers(scripted_reward)
    name = {"unary_unary": "OpenRun", "stream_stream": "Score"}[method]
    async with grpc.aio.insecure_channel(address) as channel:
        call = getattr(channel, method)(f"/{REWARD}/{name}")
        with caplog.at_level(logging.WARNING):
            answer = (
                call(b"\xff\xff\xff") if method == "unary_unary" else call(iter([b"\xff\xff\xff"])).read()
            )
            error = await failure(answer)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and reason_of(error) == "UNDECODABLE"
    assert name in message_of(error)
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]


async def test_health_checks_refuse_bytes_that_do_not_decode(servers, scripted_reward):
    _, address = await servers(scripted_reward)
    async with grpc.aio.insecure_channel(address) as channel:
        error = await failure(channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("quoted", ["x" * 1_000_000, "\U0001f4a9" * 50_000, "%" * 20_000, "\ud800", "a\0b\n"])
async def test_a_refusal_arrives_whatever_it_quotes(servers, reward_stub, scripted_reward, quoted):
    def refuse(request, context):
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", f"key: {quoted}", key=quoted)

    scripted_reward.ListScorers = refuse
    _, address = await servers(scripted_reward)
    error = await failure(reward_stub(address).ListScorers(reward_pb2.ListScorersRequest()))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")
    assert message_of(error).startswith("key: ")


async def test_a_refused_call_teaches_no_coordinator_epoch(servers, reward_stub, scripted_reward):
    """Whoever forges an epoch must at least get a command accepted."""
    fence, refused = Fence(), (grpc.aio.AioRpcError, grpc.RpcError)
    fence.obey(4, "store")
    open_run, score = scripted_reward.OpenRun, scripted_reward.Score

    async def guarded_open(request, context):
        fence.check(request.header, lease=False)
        return await open_run(request, context)

    async def guarded_score(requests, context):
        first = await anext(aiter(requests))
        fence.check(first.header, lease=False)
        async for response in score(_stream(first), context):
            yield response

    scripted_reward.OpenRun, scripted_reward.Score = guarded_open, guarded_score
    _, address = await servers(scripted_reward)
    stub = reward_stub(address)

    def message(kind, epoch, **fields):
        return kind(header=common_pb2.CommandHeader(run="runs/r", coordinator_epoch=epoch), **fields)

    for script in ("refuse:NOT_NOW", "crash:boom"):
        with pytest.raises(refused):
            await stub.OpenRun(message(reward_pb2.OpenRunRequest, 1000, config_json=script))
    bad = message(reward_pb2.ScoreRequest, 1000, items=[reward_pb2.ScoreItem(attempt=13)])
    with pytest.raises(refused):
        await anext(aiter(stub.Score(_stream(bad))))
    assert fence.coordinator_epoch == 4
    good = message(reward_pb2.ScoreRequest, 5, items=[reward_pb2.ScoreItem(attempt=1)])
    assert (await anext(aiter(stub.Score(_stream(good))))).results
    assert fence.coordinator_epoch == 5
    await stub.OpenRun(message(reward_pb2.OpenRunRequest, 6))
    assert fence.coordinator_epoch == 6


async def _stream(*messages):
    for message in messages:
        yield message
