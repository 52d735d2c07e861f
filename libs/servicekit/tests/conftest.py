"""Real servers on free ports, a scripted FleetService, and waiting with a deadline and a name."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from google.protobuf import duration_pb2
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_servicekit.rpc.certificates import make_authority, make_certificate
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.rpc.tls import VARIABLE
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore

sys.path.insert(0, str(Path(__file__).resolve().parent))

REWARD = "headrace.reward.v1.RewardService"
FLEET = "headrace.coordinator.v1.FleetService"


class ScriptedReward(reward_pb2_grpc.RewardServiceServicer):
    """A servicer whose OpenRun does what its config says and whose Score echoes."""

    def __init__(self):
        self.opened = 0
        self.deadlines = []
        self.go_on = asyncio.Event()

    async def ListScorers(self, request, context):
        return reward_pb2.ListScorersResponse(next_page_token=request.page_token)

    async def OpenRun(self, request, context):
        self.opened += 1
        self.deadlines.append(context.time_remaining())
        match request.config_json.partition(":")[::2]:
            case ("refuse", reason):
                raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, reason, "not now; later", key="k")
            case ("crash", text):
                raise ValueError(text)
            case ("sleep", seconds):
                await asyncio.sleep(float(seconds))
            case ("hold", _):
                await self.go_on.wait()
            case ("unavailable", times) if self.opened <= int(times):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "try again")
        return reward_pb2.OpenRunResponse(scorer_digest="done")

    async def Score(self, request_iterator, context):
        async for request in request_iterator:
            for item in request.items:
                if item.attempt == 13:
                    raise ServiceError(grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "no such slot")
                result = reward_pb2.ScoreResult(sample=item.sample, attempt=item.attempt)
                yield reward_pb2.ScoreResponse(results=[result])


@dataclass
class Fleet(fleet_pb2_grpc.FleetServiceServicer):
    """A coordinator's FleetService that records, answers heartbeats, and sends what a test says."""

    epoch: int = 1
    ttl_s: float = 30.0
    interval_s: float = 0.1
    renew: bool = True
    stale: set[int] = field(default_factory=set)
    registered: list = field(default_factory=list)
    events: list = field(default_factory=list)
    supervised: list = field(default_factory=list)
    commands: asyncio.Queue = field(default_factory=asyncio.Queue)
    supervisor_commands: asyncio.Queue = field(default_factory=asyncio.Queue)
    acknowledge: bool = True
    reading: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self):
        self.reading.set()

    async def Register(self, request, context):
        self.registered.append(request)
        return fleet_pb2.RegisterResponse(
            coordinator_epoch=self.epoch,
            heartbeat_interval=seconds(self.interval_s),
            lease_ttl=seconds(self.ttl_s),
            stale_lease_epochs=[held.epoch for held in request.held_leases if held.epoch in self.stale],
        )

    async def Session(self, request_iterator, context):
        async def read():
            async for request in request_iterator:
                await self.reading.wait()
                self.events.append(request)
                if request.WhichOneof("event") == "heartbeat" and self.acknowledge:
                    await self.commands.put(self.ack(request.heartbeat))

        reading = asyncio.ensure_future(read())
        try:
            while True:
                yield await self.commands.get()
        finally:
            reading.cancel()

    async def Supervise(self, request_iterator, context):
        async def read():
            async for request in request_iterator:
                self.supervised.append(request)

        reading = asyncio.ensure_future(read())
        try:
            while True:
                yield await self.supervisor_commands.get()
        finally:
            reading.cancel()

    def ack(self, heartbeat):
        epochs = set(heartbeat.lease_epochs)
        ack = fleet_pb2.HeartbeatAck(
            sequence=heartbeat.sequence,
            renewed_epochs=sorted(epochs - self.stale) if self.renew else [],
            stale_epochs=sorted(epochs & self.stale),
        )
        return fleet_pb2.SessionResponse(heartbeat_ack=ack)

    def grant(self, epoch, ttl_s=None):
        lease = common_pb2.Lease(
            epoch=epoch, run="runs/r", devices=["h/cpu:0"], ttl=seconds(ttl_s or self.ttl_s)
        )
        self.commands.put_nowait(fleet_pb2.SessionResponse(grant=fleet_pb2.Grant(lease=lease)))

    def revoke(self, epoch, notice_s=1.0):
        revoke = fleet_pb2.Revoke(epoch=epoch, notice=seconds(notice_s))
        self.commands.put_nowait(fleet_pb2.SessionResponse(revoke=revoke))

    def drain(self, grace_s):
        self.commands.put_nowait(fleet_pb2.SessionResponse(drain=fleet_pb2.Drain(grace=seconds(grace_s))))

    def said(self, kind):
        return [getattr(e, kind) for e in self.events if e.WhichOneof("event") == kind]


def seconds(value):
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(round(value * 1000))
    return duration


@pytest.fixture
def until() -> Callable:
    async def wait(condition, what, timeout_s=10.0):
        end = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < end, f"still waiting for {what}"
            await asyncio.sleep(0.01)
        return found

    return wait


@pytest.fixture
def certified(tmp_path, monkeypatch) -> Callable:
    """`certified(role)` gives this process a certificate: its servers may listen beyond the loopback."""

    def certify(role="reward"):
        folder = tmp_path / "tls"
        make_authority(folder, "head")
        make_certificate(folder, folder, role, "here")
        monkeypatch.setenv(VARIABLE, str(folder))

    return certify


@pytest.fixture
async def servers() -> AsyncIterator[Callable]:
    """`await servers(servicer, token=..., listen=...)` starts a server; returns it and its address."""
    started = []

    async def start(servicer, *, token=None, listen="127.0.0.1:0", **options):
        server = GrpcServer(listen, token=token, instance="test", **options)
        if isinstance(servicer, fleet_pb2_grpc.FleetServiceServicer):
            server.add_service(fleet_pb2_grpc.add_FleetServiceServicer_to_server, servicer, FLEET)
        else:
            server.add_service(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, REWARD)
        address = await server.start()
        started.append(server)
        return server, address

    yield start
    for server in started:
        await server.drain(0)


@pytest.fixture
async def reward_stub() -> AsyncIterator[Callable]:
    """`reward_stub(address, token)` is a stub on a channel that is closed at the end."""
    channels = []

    def make(address, token=None):
        channels.append(dial(address, token=token))
        return reward_pb2_grpc.RewardServiceStub(channels[-1])

    yield make
    for channel in channels:
        await channel.close()


@pytest.fixture
def processes() -> Iterator[Callable]:
    """`processes(command, **options)` starts a process that is gone at the end."""
    started = []

    def start(command, **options):
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(10)


@pytest.fixture
def scripted_reward():
    return ScriptedReward()


@pytest.fixture
def new_fleet():
    return Fleet


@pytest.fixture
def stores(tmp_path):
    """`stores(name, address)` opens a store on one shared directory, `root` another one."""
    opened = []

    def make(name, address="", root="shm"):
        opened.append(WeightStore(tmp_path / root, name, address))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
async def serve_store():
    """`await serve_store(store)` serves it at a free port, by a `servicer` of the test's own or the real one."""
    servers = []

    async def serve(store, token=None, servicer=None):
        server = GrpcServer("127.0.0.1:0", token=token)
        add = weights_pb2_grpc.add_WeightServiceServicer_to_server
        server.add_service(add, servicer or WeightServicer(store), "headrace.common.v1.WeightService")
        store.address = await server.start()
        servers.append(server)
        return server

    yield serve
    for server in servers:
        await server.drain(0)
