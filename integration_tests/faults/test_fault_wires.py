"""A wire between two services that is cut, slow, sliced or reset: what comes is whole, and who waits comes back.

The quick twin of test_fault_pairs.py: real servers, sessions and weights in this process, over TLS by roles.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest
from harness.wires import wire
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace.coordinator.v1 import fleet_pb2_grpc
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.service import FleetServicer
from headrace_coordinator.fleet.sessions import FleetSettings
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_servicekit.instance import Instance, InstanceConfig
from headrace_servicekit.rpc import tls
from headrace_servicekit.rpc.certificates import make_authority, make_certificate
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights import streaming
from headrace_servicekit.weights.receiving import receive_weights
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore

RUN, TOKEN = "runs/r", "t"
PIECE = 1 << 20


@pytest.fixture
def role(tmp_path, monkeypatch):
    """`role(name)` makes what is started next speak with that role's certificate."""
    make_authority(tmp_path / "authority", "head")

    def use(name):
        if not (tmp_path / name).is_dir():
            make_certificate(tmp_path / "authority", tmp_path / name, name, "here")
        monkeypatch.setenv(tls.VARIABLE, str(tmp_path / name))

    return use


async def until(condition, what):
    """Returns once it holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - state of other tasks, which tell nobody
            await asyncio.sleep(0.02)
    assert condition(), what


@asynccontextmanager
async def weights(role, tmp_path):
    """A trainer's served version of 3 MiB and a bit, and a wire to it."""
    role("trainer")
    store = WeightStore(tmp_path / "trainer-shm", "trainer", "")
    pending = store.begin(RUN, 1, [("a", common_pb2.DATA_TYPE_UINT8, (3 * PIECE + 17,))])
    pending.buffer("a")[:] = np.random.default_rng(0).bytes(3 * PIECE + 17)
    pending.seal(0, 0)
    version = store.get(RUN, 1)
    server = GrpcServer("127.0.0.1:0", token=TOKEN, instance="trainer")
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    server.add_service(add, WeightServicer(store), "headrace.common.v1.WeightService")
    try:
        async with wire(await server.start()) as between:
            yield version, between
    finally:
        await server.drain(0)
        store.close()


async def received(role, tmp_path, version, between):
    """Whether the rollout that asks by the wire has the bytes of the version.

    It is ordered to install again where it failed, as the coordinator does.
    """
    role("rollout")
    store = WeightStore(tmp_path / "rollout-shm", "rollout", "")
    grpc_only = [common_pb2.WEIGHT_TRANSPORT_GRPC]
    source = common_pb2.WeightSource(address=between.address, incarnation="trainer", transports=grpc_only)
    try:
        try:
            got = await receive_weights(store, RUN, version.version, version.manifest, [source], token=TOKEN)
        except ServiceError as error:
            assert error.reason == "WEIGHTS_UNAVAILABLE"
            got = await receive_weights(store, RUN, version.version, version.manifest, [source], token=TOKEN)
        whole = bytes(got.body) == bytes(version.body)
        return whole and got.stored.version.digest == version.version.digest
    finally:
        store.close()


@pytest.mark.parametrize(
    "slices", [(1, 5, 9), (16 * 1024 + 22,), (PIECE, 1), (PIECE - 1, 2), (4096, PIECE + 9, 7)], ids=str
)
async def test_weights_are_whole_however_the_bytes_are_sliced(role, tmp_path, slices):
    """One byte at a time, at the edges of TLS' records, of pieces of weights, and one before and after."""
    async with weights(role, tmp_path) as (version, between):
        between.slices = slices if slices != (1, 5, 9) else (1, 5, 9, *([4096] * 60))
        assert await received(role, tmp_path, version, between)


@pytest.mark.parametrize("at", [0, 1, 5000, PIECE, PIECE + 1, 2 * PIECE + 300, 3 * PIECE])
async def test_weights_go_on_after_a_reset_anywhere(role, tmp_path, at):
    async with weights(role, tmp_path) as (version, between):
        between.reset_after("down", at + 1)
        assert await received(role, tmp_path, version, between)
        assert between.opened > 1


async def test_weights_come_over_a_wire_that_is_slow_from_its_first_byte(role, tmp_path):
    """A connection takes some round trips of their own before anything is asked: of 0.4 s as across an ocean."""
    async with weights(role, tmp_path) as (version, between):
        between.delay_s = 0.2
        between.slices = (1 << 20,)
        assert await received(role, tmp_path, version, between)


async def test_weights_of_a_wire_that_stands_still_go_on_when_it_is_mended(role, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "IDLE_TIMEOUT_S", 1.0)
    async with weights(role, tmp_path) as (version, between):
        between.cut("down")
        asked = asyncio.create_task(received(role, tmp_path, version, between))
        await until(lambda: between.opened, "a connection")
        between.mend()
        between.delay_s = 0.005
        assert await asked


@asynccontextmanager
async def registered(role, tmp_path, wall=time.time):
    """A coordinator's fleet, and a reward instance whose session goes by a wire."""
    role("coordinator")
    event_log = EventLog(MemoryStore(), wall)
    await event_log.open("test")
    settings = FleetSettings(lease_ttl=30.0, heartbeat=0.1)
    fleet = Fleet(event_log, lambda kind, address, incarnation: None, settings)
    server = GrpcServer("127.0.0.1:0", token=TOKEN, instance="coordinator")
    add = fleet_pb2_grpc.add_FleetServiceServicer_to_server
    server.add_service(add, FleetServicer(fleet, lambda *_: None), "headrace.coordinator.v1.FleetService")
    lasting = [asyncio.create_task(each) for each in (event_log.run(), fleet.sweep())]
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    async with wire(await server.start()) as between:
        role("reward")
        config = InstanceConfig(
            kind="reward",
            host="here",
            coordinator=between.address,
            token_file=tmp_path / "token",
            shm_dir=tmp_path / "shm",
            data_dir=tmp_path / "data",
        )
        instance = Instance(config)
        await instance.start()
        try:
            await until(lambda: fleet.alive(config.incarnation), "the instance to be alive")
            yield fleet, config.incarnation, between
        finally:
            between.mend()
            await instance.stop()
            for task in lasting:
                task.cancel()
            await asyncio.gather(*lasting, return_exceptions=True)
            await server.drain(0)


async def heard(fleet, incarnation, between):
    """Returns once heartbeats pass again in both directions."""
    await until(lambda: fleet.alive(incarnation), "the session")
    before = dict(between.passed)
    await until(
        lambda: fleet.alive(incarnation) and all(between.passed[way] > before[way] + 500 for way in before),
        "heartbeats",
    )


@pytest.mark.parametrize("directions", [("up",), ("down",), ("up", "down")], ids="-".join)
async def test_a_session_whose_wire_was_cut_comes_back_as_the_same_process(role, tmp_path, directions):
    async with registered(role, tmp_path) as (fleet, incarnation, between):
        between.cut(*directions)
        before = between.opened
        await until(lambda: between.opened > before, "the instance to call again")
        between.mend()
        await heard(fleet, incarnation, between)
        assert set(fleet.event_log.state.instances) == {incarnation}


async def test_a_session_whose_wire_is_reset_again_and_again_is_the_same_process(role, tmp_path):
    async with registered(role, tmp_path) as (fleet, incarnation, between):
        for _ in range(3):
            before = between.opened
            between.reset()
            await until(lambda: between.opened > before, "the instance to call again")  # noqa: B023
        between.slices, between.delay_s = (3, 700), 0.002
        between.reset()
        await heard(fleet, incarnation, between)
        assert set(fleet.event_log.state.instances) == {incarnation}


async def test_a_session_does_not_see_that_the_coordinators_wall_clock_jumps_by_hours(role, tmp_path):
    shift = [0.0]
    async with registered(role, tmp_path, lambda: time.time() + shift[0]) as (fleet, incarnation, between):
        for shift[0] in (3600.0, -3600.0, 7200.0):
            await heard(fleet, incarnation, between)
        assert between.opened == 1 and set(fleet.event_log.state.instances) == {incarnation}
