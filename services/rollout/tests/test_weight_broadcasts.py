"""A version broadcast over Gloo to processes of their own, of which some die, stop or come late; and its changes, and
versions that lie in parts at several ranks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from broadcast_member import RUN
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from headrace_modelkit import broadcasting
from headrace_modelkit.broadcasting import Broadcasts
from headrace_servicekit.rpc.digests import manifest_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.weights import (
    Links,
    WeightServicer,
    WeightStore,
    broadcasts,
    joined,
    part_name,
    receive_weights,
    ways_of,
)
from headrace_servicekit.weights.delta import Changes

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
        self.servicer = WeightServicer(store, groups)

    def publish(self):
        pending = self.store.begin(RUN, 1, LAYOUT)
        view = pending.whole()
        view[:] = os.urandom(1 << 20) * (len(view) >> 20)
        view.release()
        self.version, self.manifest = pending.seal(0, 0)

    def members(self):
        """Receivers that have a seat or wait for one."""
        return sum(len(each.members) for each in self.servicer._broadcasts._open.values())

    def step(self, *names):
        """Version 2: another byte in each 100, of these tensors or of all."""
        before = self.store.get(RUN, 1)
        layout = [(each.name, each.data_type, tuple(each.shape)) for each in before.manifest.entries]
        pending = self.store.begin(RUN, 2, layout)
        view = pending.whole()
        view[:] = before.body
        for each in before.manifest.entries:
            if not names or each.name in names:
                stretch = slice(each.offset_bytes, each.offset_bytes + each.size_bytes, 100)
                view[stretch] = bytes(byte ^ 1 for byte in view[stretch])
        view.release()
        return pending.seal(1, 1)

    def told(self, receivers, number=1):
        source = self.store.source(RUN, number)
        source.receivers = receivers
        return source


@pytest.fixture
async def source(tmp_path, monkeypatch):
    monkeypatch.setattr(broadcasts, "GATHER_S", 30.0)  # processes begin at times of their own
    store, groups = WeightStore(tmp_path / "head", "trainer"), Held()
    server = GrpcServer("127.0.0.1:0", token=None)
    add = weights_pb2_grpc.add_WeightServiceServicer_to_server
    made = Source(store, groups)
    server.add_service(add, made.servicer, "headrace.common.v1.WeightService")
    store.address = await server.start()
    made.publish()
    yield made
    groups.go_on.set()
    await server.drain(0)
    store.close()


@pytest.fixture
def hosts(tmp_path):
    """Three stores of hosts, each with its ways: a broadcast, of changes where it can be."""
    found = [WeightStore(tmp_path / f"host-{index}", f"rollout-{index}") for index in range(3)]
    names = "collective", "delta", "grpc"
    yield [(store, ways_of(names, Links(always=True), Broadcasts())) for store in found]
    for store in found:
        store.close()


def take(source, store, told, groups=None):
    ways = ways_of(("collective", "grpc"), groups=groups or Broadcasts())
    taking = receive_weights(store, RUN, source.version, source.manifest, [told], token=None, ways=ways)
    return asyncio.create_task(taking)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_member_that_is_lost_hangs_nobody(source, hosts, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(broadcasting, "STALL_S", 2.0)
    told = source.told(3)
    said = [each.SerializeToString().hex() for each in (told, source.version, source.manifest)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(MEMBER), str(tmp_path / "child"), stdin=asyncio.subprocess.PIPE
    )
    try:
        child.stdin.write("\n".join(said).encode())
        child.stdin.close()
        (before, _), (behind, _), _ = hosts
        first = take(source, before, told)
        while source.members() < 2:  # noqa: ASYNC110 - the child's seat is no event of this process
            await asyncio.sleep(0.02)
        second = take(source, behind, told)
        await asyncio.to_thread(source.groups.there.wait, 30)
        os.kill(child.pid, fault)
        await child.wait() if fault == signal.SIGKILL else None
        source.groups.go_on.set()
        for found in (await first, await second):
            assert found.transport == common_pb2.WEIGHT_TRANSPORT_GRPC
            assert same(found.body, source.store.get(RUN, 1).body)
            assert found.fallbacks[0].startswith("collective from trainer: ")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


class Standing:
    """Groups that connect nobody, and stand before the third bucket until `go_on` is set."""

    bucket = 8 << 20

    def __init__(self, device=""):
        self.device, self.asked = device, 0
        self.there, self.go_on = threading.Event(), threading.Event()

    def device_id(self):
        return self.device

    def serve(self, host):
        return 1, None

    def join(self, *where):
        return self

    def send(self, pieces):
        for self.asked, _ in enumerate(pieces, 1):
            if self.asked == 3:
                self.there.set()
                self.go_on.wait(30)

    def receive(self):
        self.go_on.wait(30)
        yield from ()


async def test_a_member_that_leaves_ends_it_for_the_others_at_once(source, hosts):
    """Its connections stay up: no process has died."""
    groups = source.servicer._broadcasts._groups = Standing()
    leaving, staying = (take(source, store, source.told(2), groups) for store, _ in hosts[:2])
    await asyncio.to_thread(groups.there.wait, 30)
    leaving.cancel()
    found = await staying
    assert "the broadcast has lost a member: 127.0.0.1 left by byte" in found.fallbacks[0]
    assert found.transport == common_pb2.WEIGHT_TRANSPORT_GRPC
    sending = set(source.servicer._broadcasts._tasks)
    groups.go_on.set()
    await asyncio.wait(sending)
    assert groups.asked == 3, "no fourth bucket"
    assert not source.members()


@pytest.mark.parametrize(
    ("devices", "backend"),
    [(("GPU-a", "GPU-b"), "nccl"), (("GPU-a", "GPU-a"), "gloo"), (("GPU-a", ""), "gloo"), (("", ""), "gloo")],
)
async def test_nccl_is_for_members_with_a_gpu_each(source, devices, backend):
    groups = source.servicer._broadcasts._groups = Standing(devices[0])
    groups.go_on.set()
    asked = weights_pb2.JoinBroadcastRequest(
        run=RUN, number=1, host="127.0.0.1", device=devices[1], receivers=1
    )
    joining = source.servicer._broadcasts.join(asked)
    assert (await anext(joining)).backend == backend
    await joining.aclose()
    asked.held.append(4)
    with pytest.raises(ServiceError, match="held: tensor 4 of 4"):
        await anext(source.servicer._broadcasts.join(asked))


@pytest.mark.parametrize(
    ("fault", "told"), [("more", "goes beyond byte"), ("less", "ended at byte 25165824 of 29360128")]
)
async def test_a_broadcast_of_another_length_leads_to_the_next_way(
    source, own_store, monkeypatch, fault, told
):
    whole = broadcasts._Broadcast.whole

    def wrong(self, bucket):
        pieces = list(whole(self, bucket))
        yield from [*pieces, memoryview(b"more")] if fault == "more" else pieces[:-1]

    monkeypatch.setattr(broadcasts._Broadcast, "whole", wrong)
    source.groups.go_on.set()
    found = await take(source, own_store, source.told(1))
    assert found.transport == common_pb2.WEIGHT_TRANSPORT_GRPC and told in found.fallbacks[0]
    assert same(found.body, source.store.get(RUN, 1).body)
    assert len(list(own_store.directory.glob("*.weights"))) == 1


async def test_a_version_that_is_dropped_while_it_is_sent_arrives_whole(source, own_store):
    taking = take(source, own_store, source.told(1))
    await asyncio.to_thread(source.groups.there.wait, 30)
    body = source.store.get(RUN, 1).body
    source.store.keep(RUN, set())
    source.groups.go_on.set()
    found = await taking
    assert found.transport == common_pb2.WEIGHT_TRANSPORT_COLLECTIVE and same(found.body, body)


def same(body, other):
    """Without pytest's words on millions of bytes."""
    return bytes(body) == bytes(other)


async def all_take(hosts, described, told, names=()):
    version, manifest = described
    takes = (
        receive_weights(
            store,
            RUN,
            version,
            manifest,
            [told],
            token=None,
            ways=ways_of(names, groups=Broadcasts()) if names else ways,
        )
        for store, ways in hosts
    )
    found = await asyncio.gather(*takes)
    assert {each.transport for each in found} == {common_pb2.WEIGHT_TRANSPORT_COLLECTIVE}
    return found


@pytest.fixture
async def holding(source, hosts):
    """Two hosts that have version 1 of a source that has version 2, too; and a third host."""
    source.groups.go_on.set()
    await all_take(hosts[:2], (source.version, source.manifest), source.told(2))
    source.version, source.manifest = source.step()
    source.body = source.store.get(RUN, 2).body
    return source


async def test_changes_are_broadcast_to_those_that_hold_the_version_before(holding, hosts):
    found = await all_take(hosts[:2], (holding.version, holding.manifest), holding.told(2, 2))
    for each in found:
        assert same(each.body, holding.body) and not each.fallbacks
        assert 0 < each.bytes_moved < len(each.body) / 20


@pytest.mark.parametrize("without", ["a receiver", "the source"])
async def test_the_whole_is_broadcast_where_one_holds_no_base(holding, hosts, without):
    told, taking = holding.told(3, 2), hosts
    if without == "the source":
        told, taking = holding.told(2, 2), hosts[:2]
        holding.store.keep(RUN, {2})
    found = await all_take(taking, (holding.version, holding.manifest), told)
    for each in found:
        assert same(each.body, holding.body) and not each.fallbacks
        assert each.bytes_moved == len(each.body)


async def test_changes_that_were_lost_lead_to_a_broadcast_of_the_whole(holding, hosts, monkeypatch):
    code = Changes._code

    def spoilt(self, group):
        found = code(self, group)
        if group[0].offset:
            del found.changes[-1]
        return found

    monkeypatch.setattr(Changes, "_code", spoilt)
    found = await all_take(hosts[:2], (holding.version, holding.manifest), holding.told(2, 2))
    for each in found:
        assert same(each.body, holding.body) and each.bytes_moved == len(each.body)
        assert each.fallbacks[0].startswith("delta over collective from trainer: ")
    # Who finds it leaves, which the other one may hear first.
    assert any("trainer: a change of " in each.fallbacks[0] for each in found)


@pytest.mark.parametrize("third", [False, True], ids=["of two", "one of three holds another"])
async def test_what_all_members_hold_is_not_broadcast(source, hosts, third):
    """Version 2 has other bytes in two of four tensors; a third host has one of the other two."""
    source.groups.go_on.set()
    names, first = ("collective", "grpc"), (source.version, source.manifest)
    await all_take(hosts[:2], first, source.told(2), names)
    second = source.step("layers.1", "layers.3")
    if third:
        publish_other(hosts[2][0], source.store.get(RUN, 1), "layers.0")
    taking = hosts[: 2 + third]
    found = await all_take(taking, second, source.told(len(taking), 2), names)
    for each in found:
        assert same(each.body, source.store.get(RUN, 2).body) and not each.fallbacks
        assert each.bytes_moved == (7 << 20) * (2 + third)


def publish_other(store, like, kept):
    """A version 1 with none of another's bytes but those of a tensor."""
    pending = store.begin(RUN, 1, LAYOUT)
    for entry in like.manifest.entries:
        if entry.name == kept:
            stretch = slice(entry.offset_bytes, entry.offset_bytes + entry.size_bytes)
            pending.buffer(entry.name)[:] = like.body[stretch]
    pending.seal(0, 0)


class Rank:
    """A trainer's rank with its part of a version."""

    def __init__(self, store, layout):
        self.store, self.layout, self.bytes = store, layout, b""

    def publish(self, number, *, other):
        pending = self.store.begin(part_name(RUN), number, self.layout)
        view = pending.whole()
        self.bytes = os.urandom(len(view)) if other else self.bytes
        view[:] = self.bytes
        view.release()
        pending.seal(number - 1, number - 1)
        self.part = self.store.get(part_name(RUN), number)

    def source(self):
        return self.store.source(part_name(RUN), self.part.version.number)


@pytest.fixture
async def ranks(tmp_path, monkeypatch):
    """Three ranks, each with another number of tensors; `ranks[i].server` serves its part."""
    monkeypatch.setattr(broadcasts, "GATHER_S", 30.0)
    found = []
    for index in range(3):
        store = WeightStore(tmp_path / f"rank-{index}", f"trainer-{index}")
        server = GrpcServer("127.0.0.1:0", token=None)
        add = weights_pb2_grpc.add_WeightServiceServicer_to_server
        server.add_service(add, WeightServicer(store, Broadcasts()), "headrace.common.v1.WeightService")
        store.address = await server.start()
        layout = [(f"{index}.{i}", common_pb2.DATA_TYPE_UINT8, (100_000 * i + 7,)) for i in range(1 + index)]
        found.append(Rank(store, layout))
        found[-1].publish(1, other=True)
        found[-1].server = server
    yield found
    for rank in found:
        await rank.server.drain(0)
        rank.store.close()


def parted(ranks, number=1):
    """(version, manifest), source, body of what the ranks have."""
    manifest = joined([rank.part.manifest for rank in ranks])
    source = common_pb2.WeightSource(address=ranks[0].store.address, incarnation="trainer-0", receivers=2)
    for rank in ranks:
        source.parts.add(source=rank.source(), tensors=len(rank.part.manifest.entries))
    described = common_pb2.PolicyVersion(number=number, digest=manifest.digest), manifest
    return described, source, b"".join(bytes(rank.part.body) for rank in ranks)


async def test_hosts_take_a_part_from_each_rank(ranks, hosts):
    described, source, body = parted(ranks)
    for each in await all_take(hosts[:2], described, source):
        assert same(each.body, body) and not each.fallbacks and each.bytes_moved == len(body)
        assert each.path is not None and same(each.path.read_bytes(), body)
    for rank in ranks:
        rank.publish(2, other=rank is ranks[1])
    described, source, body = parted(ranks, 2)
    for each in await all_take(hosts[:2], described, source, ("collective", "grpc")):
        assert same(each.body, body) and not each.fallbacks
        assert each.bytes_moved == ranks[1].part.manifest.size_bytes, "what the others have is held"


async def test_parts_that_are_not_all_of_a_version_are_told(ranks, own_store):
    described, source, _ = parted(ranks)
    del source.parts[1]
    with pytest.raises(
        ServiceError, match="parts from trainer-0: its parts have 4 tensors, and the version 6"
    ):
        await receive_weights(own_store, RUN, *described, [source], token=None)


async def test_a_part_that_a_rank_does_not_broadcast_comes_another_way(ranks, hosts):
    described, source, body = parted(ranks)
    source.receivers = 1
    ranks[1].store.ways[common_pb2.WEIGHT_TRANSPORT_COLLECTIVE] = lambda: "it has lost its network"
    source.parts[1].source.CopyFrom(ranks[1].source())
    store, ways = hosts[0]
    found = await receive_weights(store, RUN, *described, [source], token=None, ways=ways)
    assert same(found.body, body)
    assert found.fallbacks == ["collective from trainer-1: it has lost its network"]


async def test_a_rank_that_is_lost_is_named_and_nothing_is_held(ranks, hosts):
    described, source, _ = parted(ranks)
    source.receivers = 1
    await ranks[2].server.drain(0)
    store, ways = hosts[0]
    with pytest.raises(ServiceError, match=r"collective from trainer-2.*grpc from trainer-2") as caught:
        await receive_weights(store, RUN, *described, [source], token=None, ways=ways)
    assert caught.value.reason == "WEIGHTS_UNAVAILABLE" and "trainer-1" not in caught.value.message
    assert store.find(RUN, 1) is None and not list(store.directory.glob("*.weights"))


@pytest.fixture
def own_store(tmp_path):
    store = WeightStore(tmp_path / "here", "here")
    yield store
    store.close()


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


async def test_a_receiver_that_comes_while_it_runs_takes_another_way(source, own_store, hosts):
    first = take(source, own_store, source.told(1))
    await asyncio.to_thread(source.groups.there.wait, 30)
    late = await take(source, hosts[0][0], source.told(1))
    source.groups.go_on.set()
    assert late.transport == common_pb2.WEIGHT_TRANSPORT_GRPC
    assert "a broadcast of version 1 runs already" in late.fallbacks[0]
    assert (await first).transport == common_pb2.WEIGHT_TRANSPORT_COLLECTIVE


async def test_a_version_that_was_lost_is_named(source, own_store):
    told = source.told(1)
    source.store.keep(RUN, set())
    with pytest.raises(ServiceError, match=r"collective from trainer: .*is not in this weight store"):
        await take(source, own_store, told)
