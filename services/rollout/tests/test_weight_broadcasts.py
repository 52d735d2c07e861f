"""A version broadcast over Gloo to processes of their own, of which some die, stop or come late."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from broadcast_member import RUN
from headrace.common.v1 import common_pb2, weights_pb2_grpc
from headrace_modelkit.broadcasting import Broadcasts
from headrace_servicekit.rpc.digests import manifest_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights import WeightServicer, WeightStore, broadcasts
from headrace_servicekit.weights.transfer import byte_transports, receive_weights

pytestmark = pytest.mark.timeout(90)
MEMBER = Path(__file__).with_name("broadcast_member.py")
LAYOUT = [(f"layers.{i}", common_pb2.DATA_TYPE_UINT8, (7 << 20, 1)) for i in range(4)]


class Held(Broadcasts):
    """A source that stops before its third bucket until `go_on` is set."""

    def __init__(self):
        super().__init__()
        self.there, self.go_on = threading.Event(), threading.Event()

    def join(self, *where):
        group = super().join(*where)
        send = group.send

        def held(pieces):
            def asked():
                for index, piece in enumerate(pieces):
                    if index == 2:
                        self.there.set()
                        self.go_on.wait(30)
                    yield piece

            send(asked())

        group.send = held
        return group


class Source:
    def __init__(self, store, groups):
        self.store, self.groups = store, groups

    def publish(self):
        pending = self.store.begin(RUN, 1, LAYOUT)
        view = pending.whole()
        view[:] = os.urandom(1 << 20) * (len(view) >> 20)
        view.release()
        self.version, self.manifest = pending.seal(0, 0)

    def told(self, receivers):
        source = self.store.source(RUN, 1)
        source.receivers = receivers
        return source


@pytest.fixture
async def source(tmp_path, monkeypatch):
    monkeypatch.setattr(broadcasts, "GATHER_S", 30.0)  # processes begin at times of their own
    store, groups = WeightStore(tmp_path / "head", "trainer"), Held()
    server = GrpcServer("127.0.0.1:0", token=None)
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    server.add_service(add, WeightServicer(store, groups), "headrace.common.v1.WeightService")
    store.address = await server.start()
    made = Source(store, groups)
    made.publish()
    yield made
    groups.go_on.set()
    await server.drain(0)
    store.close()


@pytest.fixture
async def receivers(source, tmp_path):
    """`receivers(n)` are processes that take the version, on hosts of their own."""
    started = []

    async def start(count):
        told = [m.SerializeToString().hex() for m in (source.told(count), source.version, source.manifest)]
        for _ in range(count):
            name = f"rollout-{len(started)}"
            child = await asyncio.create_subprocess_exec(
                sys.executable, str(MEMBER), str(tmp_path / name), name,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            child.stdin.write("\n".join(told).encode())
            child.stdin.close()
            started.append(child)
        return started[-count:]

    yield start
    for child in started:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def said(child):
    return json.loads((await child.stdout.read()).splitlines()[-1])


async def test_all_hosts_get_it_at_once(source, receivers):
    source.groups.go_on.set()
    found = [await said(child) for child in await receivers(3)]
    assert found == [{"way": "COLLECTIVE", "whole": True, "failed": []}] * 3


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_member_that_is_lost_hangs_nobody(source, receivers, fault):
    children = await receivers(3)
    await asyncio.to_thread(source.groups.there.wait, 30)
    os.kill(children[1].pid, fault)
    await asyncio.sleep(0.5)
    source.groups.go_on.set()
    for child in (children[0], children[2]):
        found = await said(child)
        assert found["way"] == "GRPC" and found["whole"]
        assert "collective from trainer" in found["failed"][0]
    assert source.store.get(RUN, 1).version == source.version


async def test_a_version_that_is_dropped_while_it_is_sent_arrives_whole(source, receivers):
    (child,) = await receivers(1)
    await asyncio.to_thread(source.groups.there.wait, 30)
    source.store.keep(RUN, set())
    source.groups.go_on.set()
    assert await said(child) == {"way": "COLLECTIVE", "whole": True, "failed": []}


@pytest.fixture
def own_store(tmp_path):
    store = WeightStore(tmp_path / "here", "here")
    yield store
    store.close()


async def take(source, store, told):
    ways = byte_transports(("collective", "grpc"), groups=Broadcasts())
    return await receive_weights(
        store, RUN, source.version, source.manifest, [told], token=None, transports=ways
    )


async def test_wrong_bytes_are_named_and_come_again(source, own_store):
    source.groups.go_on.set()
    told = source.told(1)
    source.manifest.entries[2].digest = "0" * 32
    source.manifest.digest = source.version.digest = manifest_digest(source.manifest.entries)
    with pytest.raises(ServiceError, match=r"collective from trainer: tensor layers\.2"):
        await take(source, own_store, told)
    assert own_store.find(RUN, 1) is None


async def test_a_fleet_with_encryption_says_why_it_does_not_broadcast(source, own_store, monkeypatch):
    monkeypatch.setenv("HEADRACE_TLS_DIR", "/nowhere")
    told = source.told(1)
    monkeypatch.delenv("HEADRACE_TLS_DIR")
    received = await take(source, own_store, told)
    assert received.transport == common_pb2.WEIGHT_TRANSPORT_GRPC
    assert received.fallbacks == [
        "collective from trainer: process groups have no encryption, and the fleet runs with --tls"
    ]


async def test_an_expected_receiver_that_does_not_come_is_not_waited_for_long(source, own_store, monkeypatch):
    monkeypatch.setattr(broadcasts, "GATHER_S", 0.2)
    source.groups.go_on.set()
    received = await take(source, own_store, source.told(2))
    assert received.transport == common_pb2.WEIGHT_TRANSPORT_COLLECTIVE


async def test_a_receiver_that_comes_while_it_runs_takes_another_way(source, receivers, own_store):
    (first,) = await receivers(1)
    await asyncio.to_thread(source.groups.there.wait, 30)
    late = await take(source, own_store, source.told(1))
    source.groups.go_on.set()
    assert late.transport == common_pb2.WEIGHT_TRANSPORT_GRPC
    assert "a broadcast of version 1 runs already" in late.fallbacks[0]
    assert (await said(first))["way"] == "COLLECTIVE"


async def test_a_version_that_was_lost_is_named(source, own_store):
    told = source.told(1)
    source.store.keep(RUN, set())
    with pytest.raises(ServiceError, match=r"collective from trainer: .*is not in this weight store"):
        await take(source, own_store, told)
