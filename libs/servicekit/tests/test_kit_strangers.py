"""What callers without the token can hold: no call of others waits for theirs, and their connections end."""

import asyncio
import socket
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_servicekit.rpc import doors
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.doors import peer_name
from headrace_servicekit.rpc.errors import ServiceError, reason_of

CHECK = "/grpc.health.v1.Health/Check"
FLOOD = 600
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
SERVING = health_pb2.HealthCheckResponse.SERVING


def opening(script=""):
    return reward_pb2.OpenRunRequest(config_json=script, header=common_pb2.CommandHeader(run="runs/r1"))


async def never():
    await asyncio.Event().wait()
    yield b""


def watch(channel):
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)


def check_without_body(channel):
    return channel.stream_unary(CHECK)(never(), timeout=60)


def wrong_stream(channel):
    metadata = (("authorization", "Bearer wrong"),)
    return channel.stream_stream("/headrace.reward.v1.RewardService/Score")(
        never(), metadata=metadata, timeout=60
    )


def unary_without_body(channel):
    return channel.stream_unary("/headrace.reward.v1.RewardService/OpenRun")(never(), timeout=60)


def unknown(channel):
    return channel.stream_stream("/no.such.Service/Method")(never(), timeout=60)


async def check(address):
    async with dial(address, token=None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status


@pytest.mark.parametrize("flood", [watch, check_without_body, wrong_stream, unary_without_body, unknown])
async def test_calls_without_the_token_take_no_place_of_others(flood, servers, reward_stub, scripted_reward):
    _, address = await servers(scripted_reward, token="secret")
    channels = [grpc.aio.insecure_channel(address) for _ in range(3)]
    calls = [flood(channel) for channel in channels for _ in range(FLOOD // 3)]
    try:
        await asyncio.sleep(0.5)
        for _ in range(3):
            await reward_stub(address, "secret").OpenRun(opening(), timeout=5)
            assert await check(address) == SERVING
    finally:
        for call in calls:
            call.cancel()
        for channel in channels:
            await channel.close()


async def test_a_health_check_without_its_body_is_refused_in_seconds(servers, scripted_reward):
    _, address = await servers(scripted_reward, token="secret")
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(CHECK)(never(), timeout=8)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and reason_of(caught.value) == "NO_BODY"


async def test_watching_health_needs_the_token(servers, scripted_reward):
    _, address = await servers(scripted_reward, token="secret")
    async with dial(address, token=None) as stranger, dial(address, token="secret") as friend:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(stranger).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        watching = watch(friend)
        assert (await watching.read()).status == SERVING
        watching.cancel()


async def test_a_call_beyond_the_most_waits_for_a_place(servers, reward_stub, scripted_reward, until):
    _, address = await servers(scripted_reward, token="secret", max_concurrent_rpcs=1)
    stub = reward_stub(address, "secret")
    running = asyncio.ensure_future(stub.OpenRun(opening("hold")))
    await until(lambda: scripted_reward.opened == 1, "the call to start")
    waiting = asyncio.ensure_future(stub.OpenRun(opening(), timeout=20))
    await asyncio.sleep(0.3)
    assert scripted_reward.opened == 1 and not waiting.done()
    scripted_reward.go_on.set()
    await asyncio.gather(running, waiting)


async def test_a_server_without_a_place_is_asked_again(reward_stub):
    """Whoever counts calls before their token, as gRPC itself does, refuses some of them for a moment."""
    tries = []

    class Full(reward_pb2_grpc.RewardServiceServicer):
        async def OpenRun(self, request, context):
            tries.append(1)
            if len(tries) < 3:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
            return reward_pb2.OpenRunResponse()

    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Full(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await reward_stub(f"127.0.0.1:{port}", "secret").OpenRun(opening(), timeout=10)
        assert len(tries) == 3
    finally:
        await server.stop(0)


async def test_what_a_service_itself_lacks_is_not_asked_for_again(servers, reward_stub):
    tries = []

    class Full(reward_pb2_grpc.RewardServiceServicer):
        async def OpenRun(self, request, context):
            tries.append(1)
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_SPACE", "the disk is full")

    _, address = await servers(Full())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reward_stub(address).OpenRun(opening(), timeout=10)
    assert reason_of(caught.value) == "NO_SPACE" and len(tries) == 1


def connect(address, said=b""):
    host, port = address.split(":")
    connection = socket.create_connection((host, int(port)), 5)
    connection.sendall(said)
    connection.setblocking(False)
    return connection


def is_open(connection):
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


async def test_connections_of_strangers_are_few_and_end_in_seconds(
    servers, reward_stub, scripted_reward, monkeypatch
):
    monkeypatch.setattr(doors, "STRANGER_S", 3.0)
    monkeypatch.setattr(doors, "for_callers", lambda: 256)
    _, address = await servers(scripted_reward, token="secret")
    friend = reward_stub(address, "secret")
    await friend.OpenRun(opening())
    said = [b"", PREFACE[:10], PREFACE]
    strangers = await asyncio.to_thread(lambda: [connect(address, said[i % 3]) for i in range(300)])
    began = time.monotonic()
    try:
        while sum(map(is_open, strangers)) > 256 / 4:
            assert time.monotonic() - began < 5, "one peer holds many connections"
            await asyncio.sleep(0.05)
        await reward_stub(address, "secret").OpenRun(opening(), timeout=5)  # a connection of its own
        while any(map(is_open, strangers)):
            assert time.monotonic() - began < 20, "connections without the token stay"
            await asyncio.sleep(0.2)
        await friend.OpenRun(opening(), timeout=1)
    finally:
        for connection in strangers:
            connection.close()


async def test_a_stream_with_the_token_stays(servers, reward_stub, scripted_reward, monkeypatch):
    """Longer than any stranger, with one call alone on its connection."""
    monkeypatch.setattr(doors, "STRANGER_S", 2.0)
    _, address = await servers(scripted_reward, token="secret")
    call = reward_stub(address, "secret").Score()
    await call.write(reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(attempt=1)]))
    await call.read()
    await asyncio.sleep(5)
    await call.write(reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(attempt=2)]))
    assert (await call.read()).results[0].attempt == 2
    call.cancel()


async def test_a_connection_that_is_refused_again_and_again_is_ended(servers, scripted_reward, until):
    _, address = await servers(scripted_reward, token="secret")
    async with grpc.aio.insecure_channel(address) as channel:
        calls = [unary_without_body(channel) for _ in range(doors.REFUSED_CALLS + 10)]
        assert {await call.code() for call in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY, "its end", 5)


def test_peers_are_named_as_grpc_names_them():
    assert peer_name("127.0.0.1", 7) == peer_name("::ffff:127.0.0.1", 7) == "ipv4:127.0.0.1:7"
    assert peer_name("::1", 7) == "ipv6:%5B::1%5D:7"


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
async def test_a_peer_that_showed_the_token_is_known_by_its_name(
    listen, servers, reward_stub, scripted_reward
):
    server, address = await servers(scripted_reward, token="secret", listen=listen)
    await reward_stub(address, "secret").OpenRun(opening())
    (known,) = server._guard.callers.known()
    host, _, port = known.rpartition(":")
    assert int(port) > 0 and host in ("ipv4:127.0.0.1", "ipv6:%5B::1%5D")


async def test_any_listening_port_may_be_watched(monkeypatch, until):
    """As that of HTTPS: whoever's handshake stands still is known to no protocol."""
    monkeypatch.setattr(doors, "STRANGER_S", 1.0)
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    known, stranger = (connect(f"127.0.0.1:{port}") for _ in range(2))
    doors.DOORS.watch(port, lambda: {peer_name(*known.getsockname())})
    try:
        await until(lambda: not is_open(stranger), "the stranger's end")
        assert is_open(known)
    finally:
        doors.DOORS.leave(port)
        known.close()
        stranger.close()
        server.close()
