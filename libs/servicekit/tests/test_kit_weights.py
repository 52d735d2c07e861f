"""Weights that travel: taken by mapping or by gRPC, verified, and refused where they are not what was published."""

import asyncio
import os

import grpc
import pytest
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.digests import manifest_digest
from headrace_servicekit.rpc.errors import ServiceError, reason_of
from headrace_servicekit.weights import receiving
from headrace_servicekit.weights.arrivals import Arrival
from headrace_servicekit.weights.receiving import receive_weights, ways_of
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.streaming import split_piece
from headrace_servicekit.weights.ways import Attempt
from weight_parts import LAYOUT, RUN, publish, step

SHM, GRPC = common_pb2.WEIGHT_TRANSPORT_SHM, common_pb2.WEIGHT_TRANSPORT_GRPC


async def receive(store, version, manifest, *sources, token=None):
    return await receive_weights(store, RUN, version, manifest, sources, token=token)


async def test_on_the_same_host_the_producers_memory_is_mapped(stores):
    producer, receiver = stores("a"), stores("b")
    version, manifest = publish(producer)
    received = await receive(receiver, version, manifest, producer.source(RUN, 1))
    assert (received.transport, received.bytes_moved, received.fallbacks) == (SHM, 0, [])
    assert received.body == producer.get(RUN, 1).body and received.body.readonly
    assert receiver.get(RUN, 1).path.stat().st_ino == producer.get(RUN, 1).path.stat().st_ino


async def test_another_host_takes_it_by_grpc_and_says_why(stores, serve_store):
    producer, receiver = stores("a"), stores("b", root="other")
    await serve_store(producer, token="t")
    version, manifest = publish(producer)
    source = producer.source(RUN, 1)
    source.shm_nonce = "made up elsewhere"
    received = await receive(receiver, version, manifest, source, token="t")
    assert (received.transport, received.bytes_moved) == (GRPC, manifest.size_bytes)
    (why,) = received.fallbacks
    assert "shm from a" in why and "not the same host" in why
    assert bytes(received.body) == bytes(producer.get(RUN, 1).body)


@pytest.mark.parametrize("there", ["a pipe", "nothing"])
@pytest.mark.parametrize("field", ["shm_path", "shm_nonce_path"])
async def test_what_is_no_file_is_not_waited_for_and_leads_to_grpc(
    stores, serve_store, tmp_path, field, there
):
    producer, receiver = stores("a"), stores("b")
    await serve_store(producer)
    version, manifest = publish(producer)
    source, path = producer.source(RUN, 1), tmp_path / "file"
    if there == "a pipe":
        os.mkfifo(path)
    setattr(source, field, str(path))
    received = await receive(receiver, version, manifest, source)
    assert received.transport == GRPC and received.fallbacks[0].startswith("shm from a: ")
    assert there == "a pipe" or str(path) in received.fallbacks[0]


@pytest.mark.parametrize("address", ["", "\0", "no address", "127.0.0.1:99999", "x" * 10_000, "\U0001f4a9:1"])
async def test_an_address_that_is_none_is_no_source(stores, address):
    producer, receiver = stores("a"), stores("b", root="other")
    version, manifest = publish(producer)
    source = common_pb2.WeightSource(address=address, incarnation="a", transports=[GRPC])
    with pytest.raises(ServiceError) as caught:
        await receive(receiver, version, manifest, source)
    assert caught.value.reason == "WEIGHTS_UNAVAILABLE"
    assert [path.name for path in receiver.directory.iterdir()] == ["nonce"]


async def test_who_took_it_by_grpc_serves_others_by_both(stores, serve_store):
    first, second = stores("a"), stores("b", root="x")
    third, fourth = stores("c", root="x"), stores("d", root="y")
    await serve_store(first)
    await serve_store(second)
    version, manifest = publish(first)
    far = first.source(RUN, 1)
    far.shm_nonce = ""
    await receive(second, version, manifest, far)
    first.close()
    near = second.source(RUN, 1)
    assert list(near.transports) == [SHM, GRPC] and near.incarnation == "b"
    assert (await receive(third, version, manifest, near)).transport == SHM
    near.shm_nonce = ""
    assert (await receive(fourth, version, manifest, near)).transport == GRPC


async def test_a_version_already_held_moves_nothing_and_another_digest_is_a_conflict(stores):
    producer, receiver, other = stores("a"), stores("b"), stores("c")
    version, manifest = publish(producer)
    await receive(receiver, version, manifest, producer.source(RUN, 1))
    again = await receive(receiver, version, manifest)
    assert again.bytes_moved == 0 and again.body == receiver.get(RUN, 1).body
    different = publish(other, seed=9)
    with pytest.raises(ServiceError, match="CONFLICT"):
        await receive(receiver, *different, other.source(RUN, 1))


async def test_one_instance_of_a_host_verifies_a_mapped_version_and_the_others_trust_it(stores, monkeypatch):
    producer, checked = stores("a"), []
    whole = receiving.check_body
    monkeypatch.setattr(
        receiving, "check_body", lambda body, manifest: (checked.append(1), whole(body, manifest))
    )
    version, manifest = publish(producer)
    others = [stores(name) for name in "bcde"]
    source = producer.source(RUN, 1)
    found = await asyncio.gather(*(receive(store, version, manifest, source) for store in others))
    assert [each.transport for each in found] == [SHM] * 4 and checked == [1]
    other_host = stores("f", root="other")
    other_host.map_shared = producer.map_shared
    await receive(other_host, version, manifest, source)
    assert checked == [1, 1], "another host's instances share no word of it"


async def test_what_another_instance_has_verified_is_trusted_for_the_same_bytes_and_digest_alone(stores):
    producer, first, second = stores("a"), stores("b"), stores("c")
    version, manifest = publish(producer)
    await receive(first, version, manifest, producer.source(RUN, 1))
    lying = common_pb2.WeightManifest.FromString(manifest.SerializeToString())
    lying.entries[0].digest = "0" * 32
    lying.digest = manifest_digest(lying.entries)
    told = common_pb2.PolicyVersion(number=1, digest=lying.digest)
    with pytest.raises(ServiceError, match="DIGEST_MISMATCH"):
        await receive(second, told, lying, producer.source(RUN, 1))
    copy = stores("d")
    publish(copy)
    spoil(copy.get(RUN, 1).path, 3)
    with pytest.raises(ServiceError, match="DIGEST_MISMATCH"):
        await receive(second, version, manifest, copy.source(RUN, 1))


def spoil(path, offset):
    os.chmod(path, 0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


async def test_one_flipped_bit_is_refused_over_both_transports_and_leaves_nothing(stores, serve_store):
    producer, receiver = stores("a"), stores("b")
    await serve_store(producer)
    version, manifest = publish(producer)
    spoil(producer.get(RUN, 1).path, manifest.entries[1].offset_bytes + 7)
    with pytest.raises(ServiceError, match="DIGEST_MISMATCH") as caught:
        await receive(receiver, version, manifest, producer.source(RUN, 1))
    assert "shm from a: tensor head" in caught.value.message
    assert "grpc from a: tensor head" in caught.value.message
    assert receiver.find(RUN, 1) is None
    assert [path.name for path in receiver.directory.iterdir()] == ["nonce"]


async def test_a_spoiled_source_is_passed_over_for_a_sound_one(stores):
    spoiled, sound, receiver = stores("a"), stores("b"), stores("c")
    version, manifest = publish(spoiled)
    publish(sound)
    spoil(spoiled.get(RUN, 1).path, 0)
    received = await receive(receiver, version, manifest, spoiled.source(RUN, 1), sound.source(RUN, 1))
    assert received.transport == SHM and "tensor embed" in received.fallbacks[0]
    assert received.body == sound.get(RUN, 1).body


async def test_a_manifest_that_contradicts_itself_is_refused_before_anything_moves(stores):
    producer, receiver = stores("a"), stores("b")
    version, manifest = publish(producer)
    source = producer.source(RUN, 1)

    def changed(change):
        copy = common_pb2.WeightManifest.FromString(manifest.SerializeToString())
        change(copy)
        return copy

    for change in (
        lambda m: setattr(m, "size_bytes", m.size_bytes + 1),
        lambda m: setattr(m.entries[1], "offset_bytes", 0),
        lambda m: setattr(m.entries[1], "size_bytes", 1 << 60),
        lambda m: m.entries[0].shape.append(2),
        lambda m: setattr(m.entries[0], "digest", "0" * 32),
        lambda m: setattr(m.entries[0], "name", "head"),
        lambda m: m.entries.pop(),
        lambda m: setattr(m, "digest", "0" * 32),
    ):
        with pytest.raises(ServiceError) as caught:
            await receive(receiver, version, changed(change), source)
        assert caught.value.reason in ("INVALID", "DIGEST_MISMATCH")
    with pytest.raises(ServiceError, match="DIGEST_MISMATCH"):
        await receive(receiver, common_pb2.PolicyVersion(number=1, digest="x"), manifest, source)
    empty = common_pb2.WeightManifest(digest=manifest_digest([]))
    with pytest.raises(ServiceError, match="at least one tensor"):
        await receive(receiver, common_pb2.PolicyVersion(number=1, digest=empty.digest), empty, source)


async def test_a_dead_source_is_named_and_leaves_nothing(stores, serve_store):
    producer, receiver = stores("a"), stores("b")
    server = await serve_store(producer)
    version, manifest = publish(producer)
    source = producer.source(RUN, 1)
    source.shm_nonce = ""
    await server.drain(0)
    with pytest.raises(ServiceError, match="WEIGHTS_UNAVAILABLE") as caught:
        await receive(receiver, version, manifest, source)
    assert producer.address in caught.value.message
    assert [path.name for path in receiver.directory.iterdir()] == ["nonce"]


class Wrong(WeightServicer):
    """Breaks its stream after every piece, or sends other pieces than those that were asked for."""

    def __init__(self, store, fault):
        super().__init__(store)
        self.fault, self.calls = fault, 0

    async def FetchWeights(self, request, context):
        self.calls += 1
        sent = 0
        async for piece in super().FetchWeights(request, context):
            if self.fault == "hole" and sent:
                piece.offset_bytes += 1
            if self.fault == "beyond" and sent == 3:
                piece.data += b"more"
            if self.fault == "short" and sent:
                return
            sent += 1
            yield piece
            if self.fault == "stutters":
                await asyncio.sleep(0.05)
                raise ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "going")


@pytest.mark.parametrize(("held", "calls"), [(False, 4), (True, 2)])
async def test_a_broken_stream_goes_on_where_it_broke(stores, serve_store, held, calls):
    producer, receiver = stores("a"), stores("b")
    servicer = Wrong(producer, "stutters")
    await serve_store(producer, servicer=servicer)
    version, manifest = publish(producer)
    if held:
        publish(receiver)
        version, manifest = step(producer, 2, "embed", "bias")
    source = producer.source(RUN, version.number)
    source.shm_nonce = ""
    received = await receive(receiver, version, manifest, source)
    assert received.transport == GRPC and servicer.calls == calls
    assert bytes(received.body) == bytes(producer.get(RUN, version.number).body)


@pytest.fixture
async def two_hosts(stores, serve_store):
    """A producer, and a receiver of another host that holds version 1."""
    producer, receiver = stores("a"), stores("b", root="other")
    await serve_store(producer)
    version, manifest = publish(producer)
    await take_by_grpc(receiver, producer, version, manifest)
    return producer, receiver


async def take_by_grpc(receiver, producer, version, manifest):
    source = producer.source(RUN, version.number)
    return await receive_weights(
        receiver, RUN, version, manifest, [source], token=None, ways=ways_of(("grpc",))
    )


SIZES = {"embed": 602_000, "head": 2_802_800, "bias": 4}


@pytest.mark.parametrize(
    "changed", [["embed"], ["head"], ["bias"], ["embed", "bias"], ["embed", "head", "bias"], []], ids="+".join
)
async def test_tensors_that_the_receiver_holds_are_not_sent(two_hosts, changed):
    producer, receiver = two_hosts
    found = await take_by_grpc(receiver, producer, *step(producer, 2, *changed))
    assert (found.transport, found.fallbacks) == (GRPC, [])
    assert found.bytes_moved == sum(SIZES[name] for name in changed)
    assert bytes(found.body) == bytes(producer.get(RUN, 2).body)


async def test_held_bytes_that_are_not_those_of_their_digest_are_sent(two_hosts):
    producer, receiver = two_hosts
    spoil(receiver.get(RUN, 1).path, SIZES["embed"] + 5)
    found = await take_by_grpc(receiver, producer, *step(producer, 2, "embed"))
    assert found.bytes_moved == SIZES["embed"] + SIZES["head"]
    assert bytes(found.body) == bytes(producer.get(RUN, 2).body)


async def test_a_source_that_sends_what_is_held_is_checked_like_any_other(two_hosts):
    producer, receiver = two_hosts
    version, manifest = step(producer, 2, "embed")
    held = Attempt(receiver, RUN, version, manifest, None, tuple(receiver.versions(RUN))).kept()
    assert list(held) == [1, 2]
    body, whole = producer.get(RUN, 2).body, memoryview(bytearray(manifest.size_bytes))
    arrival = Arrival(whole, manifest.entries, held)
    await arrival.add(body[: SIZES["embed"] + 10])
    assert arrival.offset == SIZES["embed"] + 10
    with pytest.raises(ServiceError, match="tensor head"):
        await arrival.add(memoryview(bytes(SIZES["head"] - 10)))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("hole", "at 1048577, expected one at 1048576"),
        ("beyond", "a piece of"),
        ("short", "ended at byte 1048576"),
    ],
)
async def test_pieces_that_were_not_asked_for_are_told_and_leave_nothing(stores, serve_store, fault, told):
    producer, receiver = stores("a"), stores("b", root="other")
    await serve_store(producer, servicer=Wrong(producer, fault))
    with pytest.raises(ServiceError, match=told):
        await take_by_grpc(receiver, producer, *publish(producer))
    assert [path.name for path in receiver.directory.iterdir()] == ["nonce"]


async def test_dropped_versions_are_gone_but_bodies_in_use_stay(stores):
    producer, receiver = stores("a"), stores("b")
    version, manifest = publish(producer)
    publish(producer, number=2, seed=1)
    received = await receive(receiver, version, manifest, producer.source(RUN, 1))
    before, own = bytes(received.body), producer.get(RUN, 1).body
    path = producer.get(RUN, 1).path
    producer.keep(RUN, {2})
    assert not path.exists() and producer.find(RUN, 1) is None and producer.find(RUN, 2)
    receiver.keep(RUN, set())
    producer.close()
    assert bytes(received.body) == before and bytes(own) == before


async def test_what_a_store_does_not_have_is_refused(stores, serve_store):
    store = stores("a")
    await serve_store(store)
    version, manifest = publish(store)
    async with dial(store.address, token=None) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)
        reply = await stub.GetManifest(weights_pb2.GetManifestRequest(run=RUN, number=1))
        assert (reply.version, reply.manifest) == (version, manifest)
        for reason, asked in (
            ("NOT_FOUND", {"number": 2}),
            ("INVALID", {"number": 1, "offset_bytes": 1 << 40}),
            ("INVALID", {"number": 1, "held": [3]}),
        ):
            call = stub.FetchWeights(weights_pb2.FetchWeightsRequest(run=RUN, **asked))
            with pytest.raises(Exception) as caught:
                await call.read()
            assert reason_of(caught.value) == reason


def test_a_pieces_header_is_read_as_protobuf_would():
    for offset in (0, 1, 127, 128, 1 << 20, (1 << 63) + 5):
        for data in (b"", b"x", b"y" * 127, b"z" * 128, bytes(1 << 20)):
            message = weights_pb2.FetchWeightsResponse(offset_bytes=offset, data=data).SerializeToString()
            assert split_piece(message) == (offset, data)
    # Fields in another order, unknown ones, and a longer varint than needed are legal too.
    turned = b"\x12\x02ab" + b"\x08\x05"
    assert split_piece(turned) == (5, b"ab")
    assert split_piece(b"\x08\x05\x12\x02ab\x98\x06\x05") == (5, b"ab")
    assert split_piece(b"\x08\x85\x00\x12\x01a") == (5, b"a")


async def test_tensors_without_elements_travel_too(stores, serve_store):
    producer, receiver = stores("a"), stores("b", root="other")
    await serve_store(producer)
    empty = common_pb2.DATA_TYPE_FLOAT32, (0, 3)
    layout = [("first", *empty), *LAYOUT, ("last", *empty)]
    await take_by_grpc(receiver, producer, *producer.begin(RUN, 1, layout).seal(0, 0))
