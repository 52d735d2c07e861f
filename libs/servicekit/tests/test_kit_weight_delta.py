"""Changes between versions: exact to the bit, small for an optimizer's steps, and never half applied."""

import asyncio

import ml_dtypes
import numpy as np
import pytest
from headrace.common.v1 import common_pb2, weights_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.weights import streaming
from headrace_servicekit.weights.arrivals import Arrival
from headrace_servicekit.weights.delta import BadChange, Part, apply, encode
from headrace_servicekit.weights.receiving import receive_weights, ways_of
from headrace_servicekit.weights.serving import WeightServicer
from headrace_servicekit.weights.ways import Links
from weight_parts import RUN, publish

SHM, GRPC = common_pb2.WEIGHT_TRANSPORT_SHM, common_pb2.WEIGHT_TRANSPORT_GRPC
DELTA = common_pb2.WEIGHT_TRANSPORT_DELTA
BF16 = np.dtype(ml_dtypes.bfloat16)
ELEMENTS = 3_000_000  # two responses
LAYOUT = [
    ("embed", common_pb2.DATA_TYPE_BFLOAT16, (ELEMENTS,)),
    ("none", common_pb2.DATA_TYPE_FLOAT32, (0, 3)),
    ("frozen", common_pb2.DATA_TYPE_BFLOAT16, (1000, 7)),
    ("scale", common_pb2.DATA_TYPE_FLOAT32, (701,)),
    ("seen", common_pb2.DATA_TYPE_INT64, ()),
]


def adamw_steps(count, rate=1e-6):
    """fp32 weights of the usual size, after each of some AdamW steps."""
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, ELEMENTS).astype(np.float32)
    first, second = np.zeros_like(weights), np.zeros_like(weights)
    for step in range(1, count + 1):
        yield weights
        gradient = rng.normal(0, 1e-3, ELEMENTS).astype(np.float32)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        moved = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        weights = weights - rate * moved - rate * 0.01 * weights


def publish_weights(store, number, weights):
    rng = np.random.default_rng(7)  # what is frozen
    pending = store.begin(RUN, number, LAYOUT)
    pending.buffer("embed")[:] = weights.astype(BF16).tobytes()
    pending.buffer("frozen")[:] = rng.bytes(14_000)
    pending.buffer("scale")[:] = (rng.normal(size=701) + 1e-6 * number).astype("<f4").tobytes()
    pending.buffer("seen")[:] = np.int64(number).tobytes()
    return pending.seal(number - 1, number)


def always(*names, **options):
    return ways_of(names or ("delta", "grpc"), Links(always=True, **options))


async def receive(store, version, manifest, *sources, ways):
    return await receive_weights(store, RUN, version, manifest, sources, token=None, ways=ways)


@pytest.fixture
async def two_versions(stores, serve_store):
    """A producer with two versions, and a receiver on another host that holds the first."""
    producer, receiver = stores("a"), stores("b", root="other")
    await serve_store(producer)
    first, second = [
        publish_weights(producer, number, weights) for number, weights in enumerate(adamw_steps(2), 1)
    ]
    found = await receive(receiver, *first, producer.source(RUN, 1), ways=always())
    assert found.transport == GRPC and not found.fallbacks
    return producer, receiver, second


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.04, 0.3, 1.0])
def test_a_stretch_is_restored_to_the_bit_whatever_its_elements(width, share):
    rng = np.random.default_rng(3)
    before = rng.integers(0, 256, 40_000 * width, np.uint8)
    after = before.copy().view(f"<u{width}")
    places = np.flatnonzero(rng.random(40_000) < share)
    moves = rng.integers(0, 256, len(places) * width, np.uint8).view(f"<u{width}")
    after[places] += np.where(rng.random(len(places)) < 0.8, 1, moves).astype(after.dtype)
    part = Part(0, before.nbytes, width, same=False)
    change = encode(part, memoryview(after.tobytes()), memoryview(before))
    out = bytearray(before.nbytes)
    apply(change, width, memoryview(before), memoryview(out))
    assert bytes(out) == after.tobytes()
    assert change.ByteSize() <= before.nbytes + 32
    assert bool(change.changed or change.whole) == bool(share)


def test_values_without_order_travel_too():
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-40, 3e38], np.float32).astype(BF16)
    before, after = np.repeat(values, 8), np.tile(values, 8)
    part, out = Part(0, before.nbytes, 2, same=False), bytearray(before.nbytes)
    change = encode(part, memoryview(after.tobytes()), memoryview(before.tobytes()))
    apply(change, 2, memoryview(before.tobytes()), memoryview(out))
    assert bytes(out) == after.tobytes()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: setattr(c, "changed", c.changed + 1),
        lambda c: setattr(c, "changed", 1 << 30),
        lambda c: setattr(c, "gaps", c.gaps[:5]),
        lambda c: setattr(c, "moves", b"no stream"),
        lambda c: setattr(c, "gaps", encode_bytes(np.full(c.changed, 254, np.uint8))),
        lambda c: setattr(c, "gaps", encode_bytes(np.full(c.changed, 255, np.uint8))),
        lambda c: setattr(c, "whole", b"short"),
    ],
)
def test_a_change_that_does_not_fit_is_refused(spoil):
    rng = np.random.default_rng(3)
    before = rng.integers(0, 256, 4000, np.uint8)
    after = before.copy().view("<u2")
    after[::20] += 1
    change = encode(Part(0, 4000, 2, same=False), memoryview(after.tobytes()), memoryview(before))
    spoil(change)
    with pytest.raises(BadChange):
        apply(change, 2, memoryview(before), memoryview(bytearray(4000)))


async def test_a_change_over_the_end_of_a_tensor_is_refused(stores):
    """Its tensors' digests would be taken of nothing."""
    store = stores("a")
    publish(store)
    stored = store.get(RUN, 1)
    made = Arrival(memoryview(bytearray(len(stored.body))), stored.manifest.entries, {})
    made.restart(stored)
    whole = weights_pb2.FetchWeightsResponse()
    whole.changes.add(size_bytes=len(stored.body), whole=bytes(len(stored.body)))
    with pytest.raises(ServiceError, match=f"a change of {len(stored.body)} bytes at 0"):
        await made.change(whole)


def test_versions_of_other_sizes_have_no_changes_between_them(stores):
    store = stores("a")
    store.address = "127.0.0.1:1"  # as one that is served
    first, _ = publish(store)
    publish_weights(store, 2, np.zeros(ELEMENTS, np.float32))
    assert not store.source(RUN, 2).delta_bases
    with pytest.raises(ServiceError, match="no version with digest") as caught:
        store.changes(RUN, 2, first.digest)
    assert caught.value.reason == "BASE_NOT_HELD"


def encode_bytes(numbers):
    from headrace_servicekit.weights.delta import _deflate

    return _deflate(numbers)


async def test_an_adamw_step_takes_less_than_three_hundredths_and_is_equal_to_the_bit(two_versions):
    producer, receiver, second = two_versions
    found = await receive(receiver, *second, producer.source(RUN, 2), ways=always())
    assert (found.transport, found.fallbacks) == (DELTA, [])
    assert bytes(found.body) == bytes(producer.get(RUN, 2).body)
    assert 0.005 < found.bytes_moved / second[1].size_bytes < 0.03


async def test_who_took_changes_hands_them_on_without_its_base(two_versions, stores, serve_store):
    producer, receiver, second = two_versions
    third = stores("c", root="third")
    await receive(third, *(await held(producer, 1)), producer.source(RUN, 1), ways=always())
    await serve_store(receiver)
    await receive(receiver, *second, producer.source(RUN, 2), ways=always())
    receiver.keep(RUN, {2})
    producer.close()
    found = await receive(third, *second, receiver.source(RUN, 2), ways=always())
    assert found.transport == DELTA and bytes(found.body) == bytes(receiver.get(RUN, 2).body)
    assert found.bytes_moved < 0.03 * second[1].size_bytes


async def held(store, number):
    stored = store.get(RUN, number)
    return stored.version, stored.manifest


async def test_a_receiver_of_another_base_says_so_and_takes_the_whole(two_versions, stores):
    producer, _, second = two_versions
    other = stores("c", root="third")
    own = publish(other, number=1, seed=5)
    found = await receive(other, *second, producer.source(RUN, 2), ways=always())
    (why,) = found.fallbacks
    assert found.transport == GRPC and "delta from a" in why and own[0].digest in why
    assert bytes(found.body) == bytes(producer.get(RUN, 2).body)


async def test_a_base_that_its_producer_has_dropped_meanwhile_leads_to_the_whole(two_versions):
    producer, receiver, second = two_versions
    source = producer.source(RUN, 2)
    producer.keep(RUN, {2})
    found = await receive(receiver, *second, source, ways=always())
    assert found.transport == GRPC and "no version with digest" in found.fallbacks[0]


class Broken(WeightServicer):
    """Breaks after a response, or spoils what it sends."""

    def __init__(self, store, fault):
        super().__init__(store)
        self.fault, self.calls = fault, 0

    async def FetchWeights(self, request, context):
        import grpc

        if not request.base_digest:
            async for response in super().FetchWeights(request, context):
                yield response
            return
        self.calls += 1
        if self.fault == "lost" and self.calls > 1:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "going")
        async for response in super().FetchWeights(request, context):
            sent = weights_pb2.FetchWeightsResponse()
            sent.CopyFrom(response)
            if self.fault == "spoiled" and request.offset_bytes == 0 and len(sent.changes) > 2:
                sent.changes[1].moves = encode_bytes(np.ones(sent.changes[1].changed, np.uint8))
            if self.fault == "hole":
                del sent.changes[1:2]
            if self.fault == "silent":
                await asyncio.Event().wait()
            yield sent
            if self.fault == "short":
                return
            if self.fault in ("lost", "stutters"):
                raise ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "going")


@pytest.mark.parametrize("fault", ["lost", "spoiled", "hole", "short", "silent"])
async def test_changes_that_are_lost_or_wrong_lead_to_the_whole_in_the_same_update(
    two_versions, serve_store, monkeypatch, fault
):
    if fault == "silent":
        monkeypatch.setattr(streaming, "IDLE_TIMEOUT_S", 0.2)
    producer, receiver, second = two_versions
    await serve_store(producer, servicer=Broken(producer, fault))
    found = await receive(receiver, *second, producer.source(RUN, 2), ways=always())
    (why,) = found.fallbacks
    assert found.transport == GRPC and why.startswith("delta from a: ")
    if fault == "spoiled":
        assert "tensor embed" in why
    assert bytes(found.body) == bytes(producer.get(RUN, 2).body)
    names = sorted(path.name for path in receiver.directory.iterdir())
    assert len(names) == 3, f"a part was left: {names}"


async def test_changes_alone_that_are_lost_leave_nothing(two_versions, serve_store):
    producer, receiver, second = two_versions
    await serve_store(producer, servicer=Broken(producer, "lost"))
    with pytest.raises(ServiceError, match="WEIGHTS_UNAVAILABLE"):
        await receive(receiver, *second, producer.source(RUN, 2), ways=always("delta"))
    assert receiver.find(RUN, 2) is None and receiver.find(RUN, 1)
    assert len(list(receiver.directory.iterdir())) == 2


async def test_a_broken_stream_of_changes_goes_on_where_it_broke(two_versions, serve_store):
    producer, receiver, second = two_versions
    servicer = Broken(producer, "stutters")
    await serve_store(producer, servicer=servicer)
    found = await receive(receiver, *second, producer.source(RUN, 2), ways=always())
    assert (found.transport, found.fallbacks) == (DELTA, []) and servicer.calls > 1
    assert bytes(found.body) == bytes(producer.get(RUN, 2).body)


async def test_a_whole_version_comes_every_so_often(stores, serve_store):
    producer, receiver = stores("a"), stores("b", root="other")
    await serve_store(producer)
    ways, used = always(whole_every=3), []
    for number in range(1, 8):
        published = publish(producer, number=number, seed=number)
        found = await receive(receiver, *published, producer.source(RUN, number), ways=ways)
        used.append(found.transport)
        producer.keep(RUN, {number - 1, number})
        receiver.keep(RUN, {number})
    assert used == [GRPC, DELTA, DELTA, GRPC, DELTA, DELTA, GRPC]


def test_the_quicker_way_is_taken_and_the_other_one_measured_now_and_then():
    links = Links(whole_every=4)
    used = []
    for seconds in [(1.0, 0.1)] * 9 + [(0.1, 1.0)] * 8:
        changes = links.wants_changes()
        used.append("d" if changes else "w")
        links.took(100, seconds[changes], changes=changes)
    # The first is whole; changes are quicker for 9 versions; then whole bodies are, which is found in time.
    assert "".join(used) == "wdddwdddw" + "dwwwdwww"


async def test_versions_of_one_host_are_mapped_before_changes_are_thought_of(stores, serve_store):
    producer, receiver = stores("a"), stores("b")
    await serve_store(producer)
    ways = always("shm", "delta", "grpc")
    for number in (1, 2):
        published = publish(producer, number=number, seed=number)
        found = await receive(receiver, *published, producer.source(RUN, number), ways=ways)
        assert (found.transport, found.bytes_moved) == (SHM, 0)
