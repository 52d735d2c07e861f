"""Who may call what between the services: the table of roles as a whole, over real gRPC, and what a token is worth."""

from __future__ import annotations

import asyncio
import importlib
import time
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from headrace.common.v1 import common_pb2, weights_pb2
from headrace.coordinator.v1 import fleet_pb2, fleet_pb2_grpc
from headrace.sessions.v1 import sessions_pb2, sessions_pb2_grpc
from headrace.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.service import FleetServicer
from headrace_coordinator.fleet.sessions import FleetSettings
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_servicekit.contained.settings import FACET
from headrace_servicekit.lease.fence import Fence
from headrace_servicekit.rpc import tls
from headrace_servicekit.rpc.certificates import make_authority, make_certificate
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.roles import INSTANCES, ROLES, TABLE
from headrace_servicekit.rpc.server import GrpcServer

TOKEN = "t"
USERS = "/headrace.sessions.v1."
"""People's, by tokens of their own, on a port where no service speaks."""
SERVED = grpc.StatusCode.INTERNAL
"""What a servicer without methods of its own answers whoever is let in."""


def contracts():
    """Every service of the contracts: its descriptor, its servicer and the function that mounts that."""
    root = Path(weights_pb2.__file__).parents[3]
    for file in sorted(root.glob("headrace/*/v1/*_pb2_grpc.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        module, messages = importlib.import_module(name), importlib.import_module(name.removesuffix("_grpc"))
        for each, service in messages.DESCRIPTOR.services_by_name.items():
            yield (
                service,
                getattr(module, f"{each}Servicer"),
                getattr(module, f"add_{each}Servicer_to_server"),
            )


METHODS = {
    f"/{service.full_name}/{method.name}": method for service, *_ in contracts() for method in service.methods
}


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """`fleet(role, host)` makes this process speak with that certificate of one fleet's authority."""
    make_authority(tmp_path / "authority", "head")

    def use(role, host="here", authority="authority", days=None):
        folder = tmp_path / f"{authority}-{role}-{host}-{days}"
        if not folder.is_dir():
            make_authority(tmp_path / authority, "head")
            make_certificate(tmp_path / authority, folder, role, host, days=days)
        monkeypatch.setenv(tls.VARIABLE, str(folder))

    use.plainly = lambda: monkeypatch.delenv(tls.VARIABLE, raising=False)
    return use


@asynccontextmanager
async def serving(fleet, *mounted, role="trainer"):
    """A server with the certificate of a role, and services; its address."""
    fleet(role)
    server = GrpcServer("127.0.0.1:0", token=TOKEN, instance="test")
    for add, servicer, name in mounted:
        server.add_service(add, servicer, name)
    try:
        yield await server.start()
    finally:
        await server.drain(0)


def everything():
    return [(add, servicer(), service.full_name) for service, servicer, add in contracts()]


async def status(channel, path, request=None):
    """The status of one call, whatever its shape, and what it says."""
    method = METHODS[path]
    shape = (
        ("stream" if method.client_streaming else "unary")
        + "_"
        + ("stream" if method.server_streaming else "unary")
    )
    call = getattr(channel, shape)(path)
    body = request.SerializeToString() if request is not None else b""
    began = call(iter([body]) if method.client_streaming else body, timeout=20)
    try:
        if method.server_streaming:
            async for _ in began:
                pass
        else:
            await began
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_every_rpc_but_users_has_a_row_and_every_row_an_rpc():
    rows = {path for path in TABLE if path.startswith("/headrace.")}
    assert {path for path in METHODS if not path.startswith(USERS)} == rows
    assert all(roles and roles <= set(ROLES) for roles in TABLE.values())


@pytest.mark.parametrize("role", ROLES)
async def test_the_whole_table(fleet, role):
    """Each role calls each RPC: it is let in, or told whom the RPC is for; nothing else."""
    async with serving(fleet, *everything()) as address:
        fleet(role)
        async with dial(address, token=TOKEN) as channel:
            found = {path: await status(channel, path) for path in METHODS}
    for path, (code, said) in found.items():
        if role in TABLE.get(path, ()):
            assert code is SERVED and "NotImplementedError" in said, (path, code, said)
        else:
            assert code is grpc.StatusCode.PERMISSION_DENIED and f"/{role}/here" in said, (path, code, said)


async def test_a_user_needs_the_authority_and_a_token_and_no_certificate(fleet, tmp_path):
    refused = ServiceError(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "no token")

    async def refusal(context):
        return None if ("authorization", "Bearer mine") in context.invocation_metadata() else refused

    fleet("coordinator")
    server = GrpcServer("127.0.0.1:0", token=TOKEN, instance="sessions", users=refusal)
    server.add_service(
        sessions_pb2_grpc.add_SessionServiceServicer_to_server,
        sessions_pb2_grpc.SessionServiceServicer(),
        "headrace.sessions.v1.SessionService",
    )
    address = await server.start()
    trusted = grpc.ssl_channel_credentials((tmp_path / "authority" / "ca.pem").read_bytes())
    named = [("grpc.ssl_target_name_override", tls.COORDINATOR_NAME)]
    try:
        async with (
            grpc.aio.secure_channel(address, trusted, named) as channel,
            grpc.aio.insecure_channel(address) as plain,
        ):
            stub, request = sessions_pb2_grpc.SessionServiceStub(channel), sessions_pb2.ListSessionsRequest()
            for token, code in (("mine", SERVED), (TOKEN, grpc.StatusCode.UNAUTHENTICATED)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.ListSessions(
                        request, metadata=[("authorization", f"Bearer {token}")], timeout=20
                    )
                assert caught.value.code() is code
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sessions_pb2_grpc.SessionServiceStub(plain).ListSessions(request, timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "nothing is spoken in the clear"
    finally:
        await server.drain(0)


def test_what_the_table_says_of_the_rpcs_that_matter_most():
    """Written a second time: a row that becomes wider is seen."""
    weights = {"rollout", "trainer"}
    assert all(
        TABLE[f"/headrace.common.v1.WeightService/{name}"] == weights
        for name in ("GetManifest", "FetchWeights", "JoinBroadcast", "ShareDeviceMemory")
    )
    assert TABLE["/headrace.coordinator.v1.FleetService/Register"] == set(INSTANCES)
    assert TABLE["/headrace.coordinator.v1.FleetService/Session"] == set(INSTANCES)
    for path, roles in TABLE.items():
        if path.startswith(("/headrace.trainer.", "/headrace.reward.")):
            assert roles == {"coordinator"}, path


async def test_an_rpc_without_a_row_is_nobodys(fleet, monkeypatch):
    path = "/headrace.trainer.v1.TrainerService/BeginStep"
    monkeypatch.delitem(TABLE, path)
    async with serving(fleet, *everything()) as address:
        fleet("coordinator")
        async with dial(address, token=TOKEN) as channel:
            code, said = await status(channel, path)
    assert code is grpc.StatusCode.PERMISSION_DENIED and "is for nobody" in said


WEIGHTS = "/headrace.common.v1.WeightService/FetchWeights"


async def test_the_token_alone_gets_no_connection(fleet, monkeypatch):
    """No certificate, plain and encrypted; one of another fleet; one that has expired."""
    async with serving(fleet, *everything()) as address:
        fleet.plainly()
        async with dial(address, token=TOKEN) as channel:
            assert (await status(channel, WEIGHTS))[0] is grpc.StatusCode.UNAVAILABLE
        fleet("rollout")
        trusted = grpc.ssl_channel_credentials((tls.tls_dir() / "ca.pem").read_bytes())
        named = (("grpc.ssl_target_name_override", tls.INSTANCE_NAME),)
        async with grpc.aio.secure_channel(address, trusted, named) as channel:
            assert (await status(channel, WEIGHTS))[0] is grpc.StatusCode.UNAVAILABLE
        for wrong in ({"authority": "other"}, {"days": -0.5}):
            fleet("rollout", **wrong)
            # It trusts the server, so that the server's answer is what is seen.
            theirs = tls.tls_dir()
            (theirs / "trusted").mkdir()
            for file in (tls.CERTIFICATE, tls.KEY):
                (theirs / "trusted" / file).write_bytes((theirs / file).read_bytes())
            fleet("rollout")
            (theirs / "trusted" / "ca.pem").write_bytes((tls.tls_dir() / "ca.pem").read_bytes())
            monkeypatch.setenv(tls.VARIABLE, str(theirs / "trusted"))
            async with dial(address, token=TOKEN) as channel:
                assert (await status(channel, WEIGHTS))[0] is grpc.StatusCode.UNAVAILABLE, wrong
        fleet("rollout")
        async with dial(address, token=TOKEN) as channel:
            assert (await status(channel, WEIGHTS))[0] is SERVED
        async with dial(address, token="stale") as channel:
            assert (await status(channel, WEIGHTS))[0] is grpc.StatusCode.UNAUTHENTICATED


FLEET = "headrace.coordinator.v1.FleetService"
REGISTER, SESSION, SUPERVISE = (f"/{FLEET}/{name}" for name in ("Register", "Session", "Supervise"))


@pytest.fixture
async def coordinator():
    """The real fleet of a coordinator, and its servicer as what to mount."""
    event_log = EventLog(MemoryStore(), time.time)
    await event_log.open("test")
    found = Fleet(event_log, lambda kind, address, incarnation: None, FleetSettings())
    add = fleet_pb2_grpc.add_FleetServiceServicer_to_server
    writing = asyncio.create_task(event_log.run())
    yield found, (add, FleetServicer(found, lambda request, error: None), FLEET)
    writing.cancel()


def registration(kind="trainer", host="a", incarnation="one"):
    number = fleet_pb2.ServiceKind.Value(f"SERVICE_KIND_{kind.upper()}")
    return fleet_pb2.RegisterRequest(instance=f"{kind}-0", incarnation=incarnation, kind=number, host=host)


async def test_a_contained_fleet_takes_no_service_that_does_not_contain_users_code(fleet, coordinator):
    real, (add, _, name) = coordinator
    contained = FleetServicer(real, lambda request, error: None, contained=True)
    async with serving(fleet, (add, contained, name), role="coordinator") as address:
        for kind, walls, code in (
            ("reward", [], grpc.StatusCode.FAILED_PRECONDITION),
            ("simulator", [], grpc.StatusCode.FAILED_PRECONDITION),
            ("reward", ["no network"], grpc.StatusCode.OK),
            ("trainer", [], grpc.StatusCode.OK),
        ):
            fleet(kind, "a")
            request = registration(kind, incarnation=f"{kind}{len(walls)}")
            if walls:
                request.capabilities[FACET].values.extend(walls)
            async with dial(address, token=TOKEN, name=tls.COORDINATOR_NAME) as channel:
                found, said = await status(channel, REGISTER, request)
            assert found is code, (kind, walls, said)
            assert walls or kind == "trainer" or "--trust contained" in said
    assert set(real.event_log.state.instances) == {"reward1", "trainer0"}


def death(host, incarnation="one"):
    end = fleet_pb2.ProcessExit(instance="trainer-0", incarnation=incarnation, exit_status=-9)
    return fleet_pb2.SuperviseRequest(host=host, exit=end)


async def test_nobody_takes_the_session_of_a_process_or_declares_it_dead(fleet, coordinator):
    """A trainer lives at host a. Other hosts and roles have certificates of the same fleet, and its token."""
    real, mounted = coordinator
    beat = fleet_pb2.SessionRequest(incarnation="one", heartbeat=fleet_pb2.Heartbeat(sequence=1))
    gone = fleet_pb2.SuperviseRequest(host="b", hosts_gone=fleet_pb2.HostsGone(hosts=["a"]))
    async with serving(fleet, mounted, role="coordinator") as address:

        async def call(path, request, role, host):
            fleet(role, host)
            async with dial(address, token=TOKEN, name=tls.COORDINATOR_NAME) as channel:
                return (await status(channel, path, request))[0]

        assert await call(REGISTER, registration(), "trainer", "a") is grpc.StatusCode.OK
        assert "one" in real.event_log.state.instances
        for path, request, role, host in (
            (REGISTER, registration(), "trainer", "b"),
            (REGISTER, registration(), "rollout", "a"),
            (SESSION, beat, "trainer", "b"),
            (SESSION, beat, "rollout", "a"),
            (SUPERVISE, death("a"), "supervisor", "b"),
            (SUPERVISE, death("b"), "supervisor", "b"),
            (SUPERVISE, death("a"), "rollout", "a"),
            (SUPERVISE, gone, "supervisor", "b"),
        ):
            code = await call(path, request, role, host)
            assert code is grpc.StatusCode.PERMISSION_DENIED, (path, role, host)
            assert "one" in real.event_log.state.instances, (path, role, host)
        assert await call(SESSION, beat, "trainer", "a") is grpc.StatusCode.OK
        assert await call(SUPERVISE, death("a"), "supervisor", "a") is grpc.StatusCode.OK
    assert "one" not in real.event_log.state.instances


async def test_even_on_a_loopback_no_host_speaks_for_another(coordinator, fleet):
    real, mounted = coordinator
    fleet.plainly()
    server = GrpcServer("127.0.0.1:0", token=TOKEN, instance="test")
    server.add_service(*mounted)
    address = await server.start()
    try:
        async with dial(address, token=TOKEN) as channel:
            assert (await status(channel, REGISTER, registration()))[0] is grpc.StatusCode.OK
            assert (await status(channel, SUPERVISE, death("b")))[0] is grpc.StatusCode.PERMISSION_DENIED
            assert "one" in real.event_log.state.instances
    finally:
        await server.drain(0)


async def test_a_replayed_epoch_is_refused_to_the_coordinators_own_certificate(fleet):
    """What a former coordinator said, said again by who has its certificate."""
    fence = Fence()

    class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
        async def CloseRun(self, request, context):
            fence.check(request.header, lease=False, opening=False)
            return trainer_pb2.CloseRunResponse()

    add, name = trainer_pb2_grpc.add_TrainerServiceServicer_to_server, "headrace.trainer.v1.TrainerService"
    async with serving(fleet, (add, Trainer(), name)) as address:
        fleet("coordinator")
        async with dial(address, token=TOKEN) as channel:
            found = []
            for epoch in (7, 8, 7):
                header = common_pb2.CommandHeader(run="runs/a", coordinator_epoch=epoch)
                found.append(
                    await status(channel, f"/{name}/CloseRun", trainer_pb2.CloseRunRequest(header=header))
                )
    assert [code for code, _ in found] == [grpc.StatusCode.OK] * 2 + [grpc.StatusCode.FAILED_PRECONDITION]


async def test_beyond_the_loopback_nothing_listens_without_a_certificate(fleet):
    fleet.plainly()
    with pytest.raises(ServiceError, match="without a certificate") as refused:
        await GrpcServer("0.0.0.0:0", token=TOKEN, instance="test").start()
    assert refused.value.reason == "CERTIFICATE_REQUIRED"
