"""A version comes to a host once, and from host to host as it arrives."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights import arrivals, streaming
from headrace_servicekit.weights.receiving import receive_weights
from headrace_servicekit.weights.serving import WeightServicer
from weight_parts import RUN, publish, step

SHM, GRPC = common_pb2.WEIGHT_TRANSPORT_SHM, common_pb2.WEIGHT_TRANSPORT_GRPC


class Gated(WeightServicer):
    """Sends the first piece, and goes on when it is let; counts what it sent."""

    def __init__(self, store):
        super().__init__(store)
        self.go_on, self.sent, self.streams = asyncio.Event(), 0, 0
        self.spoil = self.die = False

    async def FetchWeights(self, request, context):
        self.streams += 1
        async for piece in super().FetchWeights(request, context):
            if piece.offset_bytes > 0:
                await self.go_on.wait()
                if self.die:
                    raise ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the host is going down")
            if self.spoil:
                piece.data = bytes(len(piece.data))
            self.sent += len(piece.data)
            yield piece


@pytest.fixture
def serving(stores, serve_store):
    """`serving(name, root)` is a store that is served, and its servicer."""

    async def serve(name, root):
        store = stores(name, root=root)
        servicer = Gated(store)
        servicer.go_on.set()
        await serve_store(store, servicer=servicer)
        return store, servicer

    return serve


def source(store, *, relay=False):
    return common_pb2.WeightSource(
        address=store.address, incarnation=store.incarnation, transports=[GRPC], relay=relay
    )


def receive(store, version, manifest, *sources):
    return asyncio.create_task(receive_weights(store, RUN, version, manifest, sources, token=None))


@asynccontextmanager
async def begun(servicer):
    """Lets a stream begin, and go on at the end."""
    servicer.go_on.clear()
    yield
    servicer.go_on.set()


async def test_one_instance_of_a_host_pulls_and_the_others_map_it(serving):
    trainer, sends = await serving("t", "head")
    mates = [(await serving(name, "b"))[0] for name in "xyz"]
    version, manifest = publish(trainer)
    got = await asyncio.gather(*(receive(mate, version, manifest, source(trainer)) for mate in mates))
    assert sorted((each.transport, each.bytes_moved) for each in got) == [
        (GRPC, manifest.size_bytes),
        (SHM, 0),
        (SHM, 0),
    ]
    assert sends.sent == manifest.size_bytes
    assert {bytes(each.body) for each in got} == {bytes(trainer.get(RUN, 1).body)}


async def test_where_the_puller_ends_another_one_takes_over(serving, until):
    trainer, sends = await serving("t", "head")
    (x, _), (y, _), (z, _) = [await serving(name, "b") for name in "xyz"]
    version, manifest = publish(trainer)
    async with begun(sends):
        puller = receive(x, version, manifest, source(trainer))
        await until(lambda: x.arriving(RUN, 1) and x.arriving(RUN, 1).offset, "the first bytes")
        others = [receive(mate, version, manifest, source(trainer)) for mate in (y, z)]
        await asyncio.sleep(0.1)
        assert sends.streams == 1
        puller.cancel()
        await until(lambda: sends.streams == 2, "a second stream")
    got = await asyncio.gather(*others)
    assert sorted(each.transport for each in got) == [GRPC, SHM]
    assert x.find(RUN, 1) is None and not list(x.directory.glob("*.weights"))
    assert bytes(y.get(RUN, 1).body) == bytes(trainer.get(RUN, 1).body)


async def test_a_host_passes_on_what_has_arrived_and_is_asked_through_any_of_its_instances(serving, until):
    trainer, sends = await serving("t", "head")
    (b0, from_b0), (b1, from_b1), (c, _) = [
        await serving("b0", "b"),
        await serving("b1", "b"),
        await serving("c", "c"),
    ]
    version, manifest = publish(trainer)
    async with begun(sends):
        first = receive(b0, version, manifest, source(trainer))
        await until(lambda: b0.arriving(RUN, 1) and b0.arriving(RUN, 1).offset, "the first bytes")
        second = receive(b1, version, manifest, source(trainer))
        third = receive(c, version, manifest, source(b1, relay=True), source(trainer))
        await until(lambda: c.arriving(RUN, 1) and c.arriving(RUN, 1).offset, "bytes from the peer")
        assert not (first.done() or second.done() or third.done())
    got = await asyncio.gather(first, second, third)
    assert [each.transport for each in got] == [GRPC, SHM, GRPC] and got[2].fallbacks == []
    assert (sends.streams, from_b0.sent) == (1, manifest.size_bytes) and from_b1.sent == 0
    assert bytes(c.get(RUN, 1).body) == bytes(trainer.get(RUN, 1).body)


async def test_a_host_passes_on_what_it_was_not_sent(serving, until):
    """It holds the largest tensor; of the next ones, one holds nothing and one holds it too."""
    (trainer, sends), (b, from_b), (c, _), (d, _) = [
        await serving("t", "head"),
        await serving("b", "b"),
        await serving("c", "c"),
        await serving("d", "d"),
    ]
    first = publish(trainer)
    for store in (b, d):
        await receive(store, *first, source(trainer))
    version, manifest = step(trainer, 2, "embed", "bias")
    async with begun(sends):
        first = receive(b, version, manifest, source(trainer))
        await until(lambda: b.arriving(RUN, 2) and b.arriving(RUN, 2).offset > 1 << 20, "the held tensor")
        others = [receive(x, version, manifest, source(b, relay=True), source(trainer)) for x in (c, d)]
        for x in (c, d):
            await until(lambda x=x: x.arriving(RUN, 2) and x.arriving(RUN, 2).offset > 1 << 20, "the peer's")
    got = await asyncio.gather(first, *others)
    assert [each.bytes_moved for each in got] == [602_004, manifest.size_bytes, 602_004]
    assert from_b.sent == manifest.size_bytes + 602_004 and not (got[1].fallbacks or got[2].fallbacks)
    assert {bytes(x.get(RUN, 2).body) for x in (b, c, d)} == {bytes(trainer.get(RUN, 2).body)}


@pytest.mark.parametrize("fault", ["dies", "is silent", "is slow", "spoils", "has none"])
async def test_a_peer_that_fails_is_left_for_the_trainer_from_where_it_was(
    serving, until, monkeypatch, fault
):
    monkeypatch.setattr(streaming, "RELAY_SILENCE_S", 0.3 if fault == "is silent" else 5.0)
    monkeypatch.setattr(streaming, "SLOW_S", 0.3 if fault == "is slow" else 10.0)
    monkeypatch.setattr(arrivals, "SIGN_S", 0.1)
    monkeypatch.setattr("headrace_servicekit.weights.serving.BEGIN_S", 0.2)
    (trainer, sends), (peer, relays), (c, _) = [
        await serving("t", "head"),
        await serving("p", "b"),
        await serving("c", "c"),
    ]
    version, manifest = publish(trainer)
    upstream = receive(peer, version, manifest, source(trainer)) if fault != "has none" else None
    if fault == "is slow":
        sends.go_on.clear()
    elif upstream:
        await upstream
        relays.spoil, relays.die = fault == "spoils", fault == "dies"
        if fault in ("dies", "is silent"):
            relays.go_on.clear()
    if fault == "is slow":
        await until(lambda: peer.arriving(RUN, 1), "the peer")
    before = sends.sent
    got = receive(c, version, manifest, source(peer, relay=True), source(trainer))
    if fault == "dies":
        await until(lambda: c.arriving(RUN, 1) and c.arriving(RUN, 1).offset, "bytes from the peer")
        relays.go_on.set()
    if fault == "is slow":
        await until(lambda: sends.streams == 2, "a second stream")
        sends.go_on.set()
        await upstream
    found = await got
    (why,) = found.fallbacks
    wanted = {
        "dies": "going down",
        "is silent": "sent nothing",
        "is slow": "slow: ",
        "spoils": "tensor embed",
        "has none": "not in this weight store",
    }
    assert why.startswith("grpc from p: ") and wanted[fault] in why
    assert bytes(c.get(RUN, 1).body) == bytes(trainer.get(RUN, 1).body)
    if fault in ("dies", "is silent"):
        assert 0 < sends.sent - before < manifest.size_bytes  # The rest alone.


async def test_a_puller_that_is_stuck_is_not_waited_for(serving, until, monkeypatch):
    monkeypatch.setattr(arrivals, "STUCK_S", 0.2)
    (trainer, sends), (x, _), (y, _) = [
        await serving("t", "head"),
        await serving("x", "b"),
        await serving("y", "b"),
    ]
    version, manifest = publish(trainer)
    async with begun(sends):
        stuck = receive(x, version, manifest, source(trainer))
        await until(lambda: x.arriving(RUN, 1) and x.arriving(RUN, 1).offset, "the first bytes")
        other = receive(y, version, manifest, source(trainer))
        await until(lambda: sends.streams == 2, "a second stream")
    assert {(await stuck).transport, (await other).transport} == {GRPC}


async def test_files_of_turns_go_with_their_versions(serving):
    (trainer, _), (x, _) = await serving("t", "head"), await serving("x", "b")
    for number in (1, 2):
        await receive(x, *publish(trainer, number), source(trainer))
    assert x.turn_path(RUN, 1).exists()
    async with arrivals.host_turn(x.turn_path(RUN, 1)):  # somebody still pulls it
        x.keep(RUN, {2})
        assert x.turn_path(RUN, 1).exists()
    x.keep(RUN, {2})
    assert not x.turn_path(RUN, 1).exists() and x.turn_path(RUN, 2).exists()
    x.keep(RUN, set())
    assert not x.turn_path(RUN, 2).exists()
