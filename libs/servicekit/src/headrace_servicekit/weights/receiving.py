"""How a receiver takes a version: which way, from whom, once a host over the network.

All or nothing: a body is handed out only when every tensor's digest is the manifest's. A way that fails leads to the
next one in the same call.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from typing_extensions import override

from headrace_servicekit.failpoints import failpoint
from headrace_servicekit.memory.segments import Segment
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.rpc.metrics import WEIGHT_BYTES, WEIGHT_VERIFIED, WEIGHT_VERSIONS
from headrace_servicekit.weights.arrivals import host_turn
from headrace_servicekit.weights.collective import Collective, Groups
from headrace_servicekit.weights.cuda_ipc import DeviceMemory, Mapper
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.streaming import Stream
from headrace_servicekit.weights.versions import (
    BASE_NUMBER,
    StoredWeights,
    base_name,
    check_body,
    check_manifest,
    unavailable,
)
from headrace_servicekit.weights.ways import Attempt, Found, Links, Way

ASK_S = 10.0
_NONCE_BYTES = 256
_OF_BASES = ("shm", "grpc")
"""Ways of a version that has none before it."""


@dataclass(frozen=True)
class ReceivedWeights:
    """A verified version with the transport that brought it and why better ones did not.

    `transport` is UNSPECIFIED when the store already held the version; `bytes_moved` is 0 for shm. `fallbacks` names
    each transport and source that failed, with the reason.
    """

    stored: StoredWeights
    transport: common_pb2.WeightTransport = common_pb2.WEIGHT_TRANSPORT_UNSPECIFIED
    bytes_moved: int = 0
    fallbacks: list[str] = field(default_factory=list)

    @property
    def body(self) -> memoryview:
        """Its bytes."""
        return self.stored.body

    @property
    def path(self) -> Path | None:
        """This store's own file of the body, for other processes of the host; there may be none."""
        return self.stored.path


class SharedMemory(Way):
    """The producer's file on a tmpfs of this host, mapped: no byte is moved.

    The first instance of a host verifies it and says so; `verified`: another one has, which is known.
    """

    name = "shm"
    kind = common_pb2.WEIGHT_TRANSPORT_SHM

    def __init__(self, *, verified: bool = False) -> None:
        self._verified = verified

    @override
    async def take_from(self, source: common_pb2.WeightSource, attempt: Attempt) -> Found | None:
        """Maps it, and verifies it where no other instance of this host has."""
        path, manifest, store = Path(source.shm_path), attempt.manifest, attempt.store
        try:
            _prove_same_host(source)
            segment = store.map_shared(path, manifest.size_bytes)
            body = segment.lend()
        except BlockingIOError as error:
            raise unavailable(f"{path} is being written with another version") from error
        except (OSError, ValueError) as error:
            raise unavailable(str(error)) from error
        if self._verified:
            return Found(store.adopt(attempt.run, attempt.version, manifest, path, segment, body), 0)
        async with host_turn(store.turn_path(attempt.run, attempt.version.number)) as turn:
            if not _same_file(turn.landed(attempt.version.digest), segment):
                await asyncio.to_thread(check_body, body, manifest)
                WEIGHT_VERIFIED.inc(len(body))
            stored = store.adopt(attempt.run, attempt.version, manifest, path, segment, body)
            turn.say(store.source(attempt.run, attempt.version.number), attempt.version.digest)
        return Found(stored, 0)


def _same_file(landed: common_pb2.WeightSource | None, segment: Segment) -> bool:
    """Whether an instance of this host has verified the bytes that are mapped here."""
    if landed is None:
        return False
    try:
        found = os.stat(landed.shm_path, follow_symlinks=False)
    except OSError:
        return False  # Dropped since: the file may hold another version.
    own = os.fstat(segment.handle)
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _prove_same_host(source: common_pb2.WeightSource) -> None:
    """Two hosts may have the same path; only one has the nonce that the source made up."""
    # The path comes from outside: a pipe there must not make this wait.
    handle = os.open(source.shm_nonce_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        content = file.read(_NONCE_BYTES)
    if not source.shm_nonce or content != source.shm_nonce.encode():
        raise ValueError("the nonce file holds another nonce: not the same host")


def ways_of(
    names: Sequence[str] = ("shm", "grpc"),
    links: Links | None = None,
    groups: Groups | None = None,
    mapper: Mapper | None = None,
) -> list[Way]:
    """The ways of these names, in the order given; `groups` and `mapper` are what torch does for two of them.

    A broadcast carries changes where it stands before `delta`, which is then what it leads to.
    """
    links, shared = links or Links(), SharedMemory()
    known: list[Way] = [shared, Stream(links), Stream(links, changes=True)]
    if groups is not None:
        before = names[names.index("collective") + 1 :] if "collective" in names else ()
        known.append(Collective(groups, links, changes="delta" in before))
    if mapper is not None:
        known.append(DeviceMemory(mapper, shared))
    found = {way.name: way for way in known}
    return [found[name] for name in names if name in found]


async def receive_weights(
    store: WeightStore,
    run: str,
    version: common_pb2.PolicyVersion,
    manifest: common_pb2.WeightManifest,
    sources: Iterable[common_pb2.WeightSource],
    *,
    token: str | None,
    ways: Sequence[Way] = (),
) -> ReceivedWeights:
    """Takes a version by the first way and from the first source that delivers it whole; `store` holds it then.

    `ways`, best first, are by default shared memory and whole bodies over gRPC; those within a host come before
    the others. One that fails is logged, named in `fallbacks`, and the next one is tried.

    Raises ServiceError INVALID or DIGEST_MISMATCH for a manifest that contradicts itself or the version,
    CONFLICT when the store holds other weights under the number, and when every source failed
    DIGEST_MISMATCH (the bytes were wrong somewhere) or WEIGHTS_UNAVAILABLE.
    """
    check_manifest(version, manifest)
    attempt = Attempt(store, run, version, manifest, token, tuple(store.versions(run)))
    if (held := _held(attempt)) is not None:
        return held
    ways, offers = ways or ways_of(), list(sources)
    found = await _first([way for way in ways if way.links is None], attempt, offers)
    received = _received(found, attempt) if found is not None else None
    far = [way for way in ways if way.links is not None]
    if received is None and far and offers:
        received = await _once_a_host(far, attempt, offers)
    if received is None:
        raise _nothing_worked(attempt)
    return received


async def _once_a_host(
    ways: Sequence[Way], attempt: Attempt, offers: Sequence[common_pb2.WeightSource]
) -> ReceivedWeights | None:
    """What comes over the network when it is this instance's turn; else what another one of the host has."""
    store, run, number = attempt.store, attempt.run, attempt.version.number
    async with host_turn(store.turn_path(run, number)) as turn:
        if (held := _held(attempt)) is not None:
            return held
        if (landed := turn.landed(attempt.version.digest)) is not None and (
            found := await _first([SharedMemory(verified=True)], attempt, [landed])
        ):
            return _received(found, attempt)
        own = common_pb2.WeightSource(address=store.address, incarnation=store.incarnation)
        turn.say(own, attempt.version.digest)
        attempt, received = replace(attempt, turn=turn), None
        for source in offers:
            if received is None and source.parts:
                received = await _in_parts(ways, attempt, source)
        if received is None and (found := await _first(ways, attempt, offers)):
            received = _received(found, attempt)
        if received is not None:
            turn.say(store.source(run, number), attempt.version.digest)
        return received


async def _in_parts(
    ways: Sequence[Way], attempt: Attempt, source: common_pb2.WeightSource
) -> ReceivedWeights | None:
    """The version from the ranks that have its parts, from all at once; each part has a next way of its own."""
    with attempt.noting("parts", source):
        body, parts = attempt.parts(source)
        try:
            tries = await asyncio.gather(*(_first(ways, part, [own]) for part, own in parts))
            brought = [each for each in tries if each is not None]
            if len(brought) == len(tries):
                slowest = max(brought, key=lambda part: part.seconds)
                alike = len({(part.way.name, part.found.changes) for part in brought}) == 1
                moved = sum(part.found.moved for part in brought)
                stored = body.publish(attempt.version, attempt.manifest)
                whole = Found(stored, moved, slowest.found.changes)
                return _received(replace(slowest, found=whole), attempt, measured=alike)
        except BaseException:
            body.discard()
            raise
        body.discard()
    return None


@dataclass(frozen=True)
class _Brought:
    """What a way brought, and how long it took."""

    way: Way
    found: Found
    seconds: float


async def _first(
    ways: Sequence[Way], attempt: Attempt, sources: Sequence[common_pb2.WeightSource]
) -> _Brought | None:
    """A version, or a part of one, by the first of these ways that brings it."""
    for way in ways:
        offers = []
        for source in sources:
            with attempt.noting(way.name, source):
                if way.offered(attempt, source):
                    offers.append(source)
        if not offers:
            continue
        found, started = None, time.perf_counter()
        with attempt.noting(way.name, offers[0]):
            await failpoint(f"weights.{way.name}")
            found = await way.take(attempt, offers)
        if found is not None:
            return _Brought(way, found, time.perf_counter() - started)
    return None


def _received(brought: _Brought, attempt: Attempt, *, measured: bool = True) -> ReceivedWeights:
    way, found = brought.way, brought.found
    if way.links is not None and measured:
        way.links.took(len(found.stored.body), brought.seconds, changes=found.changes)
    WEIGHT_VERSIONS.labels(way.name).inc()
    WEIGHT_BYTES.labels(way.name).inc(found.moved)
    why = [failure.message for failure in attempt.failures]
    return ReceivedWeights(found.stored, way.kind, found.moved, why)


def _held(attempt: Attempt) -> ReceivedWeights | None:
    """The version where the store has it already. Raises ServiceError CONFLICT where that has other weights."""
    version = attempt.version
    held = attempt.store.find(attempt.run, version.number)
    if held is not None and held.version.digest != version.digest:
        raise ServiceError(
            grpc.StatusCode.ALREADY_EXISTS,
            "CONFLICT",
            f"version {version.number} is held with digest {held.version.digest}, not {version.digest}",
        )
    return ReceivedWeights(held) if held is not None else None


def _nothing_worked(attempt: Attempt) -> ServiceError:
    failures = attempt.failures
    reasons = (
        " | ".join(failure.message for failure in failures) or "no source offers a transport that is used"
    )
    message = (
        f"version {attempt.version.number} of {attempt.run} could not be taken from any source: {reasons}"
    )
    if any(failure.reason == "DIGEST_MISMATCH" for failure in failures):
        return ServiceError(grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH", message)
    if any(failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED for failure in failures):
        return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_SPACE", message)
    return unavailable(message)


async def receive_base(
    store: WeightStore,
    run: str,
    wanted: common_pb2.AdapterBase,
    sources: Sequence[common_pb2.WeightSource],
    *,
    token: str | None,
    ways: Sequence[Way],
) -> ReceivedWeights:
    """The base that adapters are of: the one that `store` holds, or it is taken from the first source that has it.

    One with another digest is dropped. Raises ServiceError BASE_NOT_HELD where no source has it, and what
    `receive_weights` raises.
    """
    name = base_name(run)
    held = store.find(name, BASE_NUMBER)
    if held is not None and held.version.digest == wanted.digest:
        return ReceivedWeights(held)
    store.keep(name, set())
    failures = []
    for source in sources:
        try:
            found = await _described(name, source, token)
        except grpc.aio.AioRpcError as error:
            failures.append(f"{source.incarnation}: {message_of(error)}")
            continue
        if found.version.digest != wanted.digest:
            failures.append(f"{source.incarnation} has the base {found.version.digest}")
            continue
        chosen = [way for way in ways if way.name in _OF_BASES]
        return await receive_weights(
            store, name, found.version, found.manifest, [found.source], token=token, ways=chosen
        )
    raise ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "BASE_NOT_HELD",
        f"the adapters are of the base {wanted.digest}, which no source has: {' | '.join(failures) or 'there is none'}",
    )


async def _described(
    name: str, source: common_pb2.WeightSource, token: str | None
) -> weights_pb2.GetManifestResponse:
    async with dial(source.address, token=token) as channel:
        stub = weights_pb2_grpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
        request = weights_pb2.GetManifestRequest(run=name, number=BASE_NUMBER)
        found: weights_pb2.GetManifestResponse = await stub.GetManifest(request, timeout=ASK_S)
        return found
