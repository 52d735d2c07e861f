"""A version broadcast over Gloo to processes of their own, of which some die, stop or come late; and its changes, and
versions that lie in parts at several ranks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from broadcast_member import CHANGES, RUN, WHOLE, Held, Standing, published, serve, take
from headrace.common.v1 import common_pb2, weights_pb2
from headrace_modelkit import broadcasting
from headrace_modelkit.broadcasting import Broadcasts
from headrace_servicekit.rpc.digests import manifest_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights import broadcasts, collective
from headrace_servicekit.weights.delta import Changes
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import joined, part_name

pytestmark = pytest.mark.timeout(90)
MEMBER = Path(__file__).with_name("broadcast_member.py")
LAYOUT = [(f"layers.{i}", common_pb2.DATA_TYPE_UINT8, (7 << 20, 1)) for i in range(4)]


COLLECTIVE, GRPC = common_pb2.WEIGHT_TRANSPORT_COLLECTIVE, common_pb2.WEIGHT_TRANSPORT_GRPC


class Source:
    def __init__(self, store, groups):
        self.store, self.groups = store, groups
        self.servicer = WeightServicer(store, groups)
        self.described = published(store, RUN, 1, LAYOUT, os.urandom(1 << 20) * 28)

    def members(self):
        """Receivers that have a seat or wait for one."""
        return sum(len(each.members) for each in self.servicer._broadcasts._open.values())

    def step(self, *names):
        """Version 2: another byte in each 100, of these tensors or of all."""
        before = self.store.get(RUN, 1)
        body = bytearray(before.body)
        for each in before.manifest.entries:
            if not names or each.name in names:
                stretch = slice(each.offset_bytes, each.offset_bytes + each.size_bytes, 100)
                body[stretch] = bytes(byte ^ 1 for byte in body[stretch])
        self.described = published(self.store, RUN, 2, LAYOUT, body)

    @property
    def body(self):
        return self.store.get(RUN, self.described[0].number).body

    def told(self, receivers):
        source = self.store.source(RUN, self.described[0].number)
        source.receivers = receivers
        return source


@pytest.fixture
async def source(tmp_path, monkeypatch):
    monkeypatch.setattr(broadcasts, "GATHER_S", 30.0)  # processes begin at times of their own
    monkeypatch.setattr(collective, "SEAT_S", 60.0)
    store, groups = WeightStore(tmp_path / "head", "trainer"), Held()
    made = Source(store, groups)
    server = await serve(store, made.servicer)
    yield made
    groups.go_on.set()
    await server.drain(0)
    store.close()


@pytest.fixture
def hosts(tmp_path):
    """Stores of three hosts."""
    found = [WeightStore(tmp_path / f"host-{index}", f"rollout-{index}") for index in range(3)]
    yield found
    for store in found:
        store.close()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_member_that_is_lost_hangs_nobody(source, hosts, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(broadcasting, "STALL_S", 2.0)
    told = source.told(3)
    said = [each.SerializeToString().hex() for each in (told, *source.described)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(MEMBER), str(tmp_path / "child"), stdin=asyncio.subprocess.PIPE
    )
    try:
        child.stdin.write("\n".join(said).encode())
        child.stdin.close()
        first = take(hosts[0], source.described, told)
        while source.members() < 2:  # noqa: ASYNC110 - the child's seat is no event of this process
            await asyncio.sleep(0.02)
        second = take(hosts[1], source.described, told)
        await asyncio.to_thread(source.groups.there.wait, 30)
        os.kill(child.pid, fault)
        await child.wait() if fault == signal.SIGKILL else None
        source.groups.go_on.set()
        for found in (await first, await second):
            assert found.transport == GRPC and same(found.body, source.body)
            assert found.fallbacks[0].startswith("collective from trainer: ")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_a_member_that_leaves_ends_it_for_the_others_at_once(source, hosts):
    """Its connections stay up: no process has died."""
    groups = source.servicer._broadcasts._groups = Standing()
    leaving, staying = (take(store, source.described, source.told(2), groups) for store in hosts[:2])
    await asyncio.to_thread(groups.there.wait, 30)
    leaving.cancel()
    found = await staying
    assert "the broadcast has lost a member: 127.0.0.1 left by byte" in found.fallbacks[0]
    assert found.transport == GRPC
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
async def test_a_broadcast_of_another_length_leads_to_the_next_way(source, hosts, monkeypatch, fault, told):
    whole = broadcasts._Broadcast.whole

    def wrong(self, bucket):
        pieces = list(whole(self, bucket))
        yield from [*pieces, memoryview(b"more")] if fault == "more" else pieces[:-1]

    monkeypatch.setattr(broadcasts._Broadcast, "whole", wrong)
    source.groups.go_on.set()
    found = await take(hosts[0], source.described, source.told(1))
    assert found.transport == GRPC and told in found.fallbacks[0]
    assert same(found.body, source.body)
    assert len(list(hosts[0].directory.glob("*.weights"))) == 1


async def test_a_version_that_is_dropped_while_it_is_sent_arrives_whole(source, hosts):
    taking = take(hosts[0], source.described, source.told(1))
    await asyncio.to_thread(source.groups.there.wait, 30)
    body = source.body
    source.store.keep(RUN, set())
    source.groups.go_on.set()
    found = await taking
    assert found.transport == COLLECTIVE and same(found.body, body)


def same(body, other):
    """Without pytest's words on millions of bytes."""
    return bytes(body) == bytes(other)


async def all_take(stores, described, told, names=CHANGES):
    found = await asyncio.gather(*(take(store, described, told, names=names) for store in stores))
    assert {each.transport for each in found} == {COLLECTIVE}
    return found


@pytest.fixture
async def holding(source, hosts):
    """Two hosts that have version 1 of a source that has version 2, too; and a third host."""
    source.groups.go_on.set()
    await all_take(hosts[:2], source.described, source.told(2))
    source.step()
    return source


@pytest.mark.parametrize("without", ["", "a receiver", "the source"])
async def test_changes_are_broadcast_where_all_hold_the_version_before(holding, hosts, without):
    taking = hosts if without == "a receiver" else hosts[:2]
    told = holding.told(len(taking))
    if without == "the source":
        holding.store.keep(RUN, {2})
    for each in await all_take(taking, holding.described, told):
        assert same(each.body, holding.body) and not each.fallbacks
        assert each.bytes_moved == len(each.body) if without else 0 < each.bytes_moved < len(each.body) / 20


async def test_changes_that_were_lost_lead_to_a_broadcast_of_the_whole(holding, hosts, monkeypatch):
    code = Changes._code

    def spoilt(self, group):
        found = code(self, group)
        if group[0].offset:
            del found.changes[-1]
        return found

    monkeypatch.setattr(Changes, "_code", spoilt)
    found = await all_take(hosts[:2], holding.described, holding.told(2))
    for each in found:
        assert same(each.body, holding.body) and each.bytes_moved == len(each.body)
        assert each.fallbacks[0].startswith("delta over collective from trainer: ")
    # Who finds it leaves, which the other one may hear first.
    assert any("trainer: a change of " in each.fallbacks[0] for each in found)


@pytest.mark.parametrize("third", [False, True], ids=["of two", "one of three holds another"])
async def test_what_all_members_hold_is_not_broadcast(source, hosts, third):
    """Version 2 has other bytes in two of four tensors; a third host has one of the other two."""
    source.groups.go_on.set()
    await all_take(hosts[:2], source.described, source.told(2), WHOLE)
    if third:
        kept = 7 << 20  # the first tensor
        published(hosts[2], RUN, 1, LAYOUT, bytes(source.body[:kept]) + bytes(3 * kept))
    source.step("layers.1", "layers.3")
    taking = hosts[: 2 + third]
    for each in await all_take(taking, source.described, source.told(len(taking)), WHOLE):
        assert same(each.body, source.body) and not each.fallbacks
        assert each.bytes_moved == (7 << 20) * (2 + third)


class Rank:
    """A trainer's rank with its part of a version."""

    def __init__(self, store, index):
        self.store, self.bytes = store, b""
        self.layout = [
            (f"{index}.{i}", common_pb2.DATA_TYPE_UINT8, (100_000 * i + 7,)) for i in range(1 + index)
        ]

    def publish(self, number, *, other):
        size = sum(shape[0] for _, _, shape in self.layout)
        self.bytes = os.urandom(size) if other else self.bytes
        published(self.store, part_name(RUN), number, self.layout, self.bytes)
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
        found.append(Rank(store, index))
        found[-1].server = await serve(store, WeightServicer(store, Broadcasts()))
        found[-1].publish(1, other=True)
    yield found
    for rank in found:
        await rank.server.drain(0)
        rank.store.close()


def parted(ranks, number=1, receivers=1):
    """(version, manifest), source, body of what the ranks have."""
    manifest = joined([rank.part.manifest for rank in ranks])
    source = common_pb2.WeightSource(
        address=ranks[0].store.address, incarnation="trainer-0", receivers=receivers
    )
    for rank in ranks:
        source.parts.add(source=rank.source(), tensors=len(rank.part.manifest.entries))
    described = common_pb2.PolicyVersion(number=number, digest=manifest.digest), manifest
    return described, source, b"".join(bytes(rank.part.body) for rank in ranks)


async def test_hosts_take_a_part_from_each_rank(ranks, hosts):
    described, source, body = parted(ranks, receivers=2)
    for each in await all_take(hosts[:2], described, source):
        assert same(each.body, body) and not each.fallbacks and each.bytes_moved == len(body)
        assert each.path is not None and same(each.path.read_bytes(), body)
    for rank in ranks:
        rank.publish(2, other=rank is ranks[1])
    described, source, body = parted(ranks, 2, receivers=2)
    for each in await all_take(hosts[:2], described, source, WHOLE):
        assert same(each.body, body) and not each.fallbacks
        assert each.bytes_moved == ranks[1].part.manifest.size_bytes, "what the others have is held"


async def test_parts_that_are_not_all_of_a_version_are_told(ranks, hosts):
    described, source, _ = parted(ranks)
    del source.parts[1]
    with pytest.raises(
        ServiceError, match="parts from trainer-0: its parts have 4 tensors, and the version 6"
    ):
        await take(hosts[0], described, source)


async def test_a_part_that_a_rank_does_not_broadcast_comes_another_way(ranks, hosts):
    ranks[1].store.ways[COLLECTIVE] = lambda: "it has lost its network"
    described, source, body = parted(ranks)
    found = await take(hosts[0], described, source)
    assert same(found.body, body)
    assert found.fallbacks == ["collective from trainer-1: it has lost its network"]


async def test_a_rank_that_is_lost_is_named_and_nothing_is_held(ranks, hosts):
    described, source, _ = parted(ranks)
    await ranks[2].server.drain(0)
    with pytest.raises(ServiceError, match=r"collective from trainer-2.*grpc from trainer-2") as caught:
        await take(hosts[0], described, source)
    assert caught.value.reason == "WEIGHTS_UNAVAILABLE" and "trainer-1" not in caught.value.message
    assert hosts[0].find(RUN, 1) is None and not list(hosts[0].directory.glob("*.weights"))


@pytest.mark.parametrize(
    ("fault", "told"), [("wrong bytes", r"tensor layers\.2"), ("lost", ".*is not in this weight store")]
)
async def test_a_version_that_no_way_brings_is_named(source, hosts, fault, told):
    source.groups.go_on.set()
    offer, (version, manifest) = source.told(1), source.described
    if fault == "lost":
        source.store.keep(RUN, set())
    else:
        manifest.entries[2].digest = "0" * 32
        manifest.digest = version.digest = manifest_digest(manifest.entries)
    with pytest.raises(ServiceError, match=f"collective from trainer: {told}"):
        await take(hosts[0], source.described, offer)
    assert hosts[0].find(RUN, 1) is None


async def test_a_fleet_with_encryption_says_why_it_does_not_broadcast(source, hosts, monkeypatch):
    with monkeypatch.context() as encrypted:
        encrypted.setenv("HEADRACE_TLS_DIR", "/nowhere")
        encrypted.setenv("HEADRACE_ENCRYPT_ALL", "1")
        told = source.told(1)
    received = await take(hosts[0], source.described, told)
    assert received.transport == GRPC
    assert received.fallbacks == [
        "collective from trainer: process groups have no encryption, and the fleet runs with --tls"
    ]


async def test_an_expected_receiver_that_does_not_come_is_not_waited_for_long(source, hosts, monkeypatch):
    monkeypatch.setattr(broadcasts, "GATHER_S", 0.2)
    source.groups.go_on.set()
    assert (await take(hosts[0], source.described, source.told(2))).transport == COLLECTIVE


async def test_a_receiver_that_comes_while_it_runs_takes_another_way(source, hosts):
    first = take(hosts[0], source.described, source.told(1))
    await asyncio.to_thread(source.groups.there.wait, 30)
    late = await take(hosts[1], source.described, source.told(1))
    source.groups.go_on.set()
    assert late.transport == GRPC and "a broadcast of version 1 runs already" in late.fallbacks[0]
    assert (await first).transport == COLLECTIVE
