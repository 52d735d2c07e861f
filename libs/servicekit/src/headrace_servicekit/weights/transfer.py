"""Weights between hosts and processes: a servicer, and a receiver that negotiates how a version comes to it.

All or nothing: a body is handed out only when every tensor's digest is the manifest's. A transport that fails leads to
the next one in the same call; what goes over the network is brought once a host.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from typing_extensions import override

from headrace_servicekit.failpoints import failpoint
from headrace_servicekit.metrics import WEIGHT_BYTES, WEIGHT_VERSIONS
from headrace_servicekit.rpc.digests import digest_bytes, manifest_digest
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.tensors import MAX_TENSOR_BYTES, tensor_bytes
from headrace_servicekit.weights.arrivals import Turn, host_turn, pieces
from headrace_servicekit.weights.broadcasts import BroadcastSource
from headrace_servicekit.weights.changed import ChangedElements
from headrace_servicekit.weights.collective import Collective, Groups
from headrace_servicekit.weights.lending import DeviceMemory, Lender, Mapper, MemorySource
from headrace_servicekit.weights.parts import PartedBody
from headrace_servicekit.weights.pending import StoredWeights, entries_of, layout_of
from headrace_servicekit.weights.pulling import WholeBody, unavailable
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.transports import Attempt, Found, Links, OneSource, Transport, Wanted

_NONCE_BYTES = 256


@dataclass(frozen=True)
class ReceivedWeights:
    """A verified body with the transport that brought it and why better ones did not.

    `transport` is UNSPECIFIED when the store already held the version; `bytes_moved` is 0 for shm. `fallbacks` names
    each transport and source that failed, with the reason. `path` is this store's own file of the body, for other
    processes of the host; there may be none.
    """

    body: memoryview
    transport: common_pb2.WeightTransport
    bytes_moved: int
    fallbacks: list[str] = field(default_factory=list)
    path: Path | None = None


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """headrace.common.v1.WeightService over a store."""

    def __init__(
        self, store: WeightStore, groups: Groups | None = None, lender: Lender | None = None
    ) -> None:
        self._store = store
        self._memory = MemorySource(store, lender) if lender is not None else None
        self._broadcasts = BroadcastSource(store, groups) if groups is not None else None

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights_pb2.GetManifestResponse:
        """Returns the manifest of a held version."""
        stored = self._store.get(request.run, request.number)
        return weights_pb2.GetManifestResponse(
            version=stored.version,
            manifest=stored.manifest,
            source=self._store.source(request.run, request.number),
        )

    async def FetchWeights(
        self, request: weights_pb2.FetchWeightsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[weights_pb2.FetchWeightsResponse]:
        """Streams what is asked for in pieces of 1 MiB at most; the version stays alive until the stream ends."""
        async for offset, data in pieces(self._store, request):
            yield weights_pb2.FetchWeightsResponse(offset_bytes=offset, data=data)

    async def FetchChanges(
        self, request: weights_pb2.FetchChangesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[weights_pb2.FetchChangesResponse]:
        """Streams what has changed from an offset on; each stretch is coded while the one before is sent."""
        changes = self._store.changes(request.run, request.number, request.base_digest)
        offsets = [offset for offset in changes.offsets if offset >= request.offset_bytes]
        if request.offset_bytes and request.offset_bytes not in offsets:
            raise _invalid(f"offset {request.offset_bytes} is no end of a response")
        for offset in offsets:
            yield await changes.response(offset)

    async def JoinBroadcast(
        self, request: weights_pb2.JoinBroadcastRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[weights_pb2.JoinBroadcastResponse]:
        """A seat in a broadcast of a held version; the stream ends with it."""
        if self._broadcasts is None:
            raise _not_served("broadcasts")
        async for seat in self._broadcasts.join(request):
            yield seat

    async def ShareDeviceMemory(
        self, request: weights_pb2.ShareDeviceMemoryRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[weights_pb2.ShareDeviceMemoryResponse]:
        """Lends the copy of a held version on this process's GPU until the call ends."""
        if self._memory is None:
            raise _not_served("memory of a GPU to lend")
        async for lent in self._memory.share(request):
            yield lent


class SharedMemory(OneSource):
    """The producer's file on a tmpfs of this host, mapped: no byte is moved."""

    name = "shm"
    kind = common_pb2.WEIGHT_TRANSPORT_SHM
    links = None

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Where the source has a file; whether it is of this host is found out."""
        return self.kind in source.transports

    @override
    async def take_from(
        self, source: common_pb2.WeightSource, store: WeightStore, wanted: Wanted, attempt: Attempt
    ) -> Found:
        """Maps and verifies it."""
        path, manifest = Path(source.shm_path), wanted.manifest
        try:
            _prove_same_host(source)
            segment = store.map_shared(path, manifest.size_bytes)
            body = segment.lend()
        except BlockingIOError as error:
            raise unavailable(f"{path} is being written with another version") from error
        except (OSError, ValueError) as error:
            raise unavailable(str(error)) from error
        await asyncio.to_thread(_verify, body, manifest)
        return Found(store.adopt(wanted.run, wanted.version, manifest, path, segment, body), 0)


def byte_transports(
    names: Sequence[str] = ("shm", "grpc"),
    links: Links | None = None,
    groups: Groups | None = None,
    mapper: Mapper | None = None,
) -> list[Transport]:
    """The transports of these names, in the order given; `groups` and `mapper` are what torch does for two of them.

    A broadcast carries changes where it stands before `delta`, which is then what it leads to.
    """
    links, shared = links or Links(), SharedMemory()
    known: list[Transport] = [shared, WholeBody(links), ChangedElements(links)]
    if groups is not None:
        before = names[names.index("collective") + 1 :] if "collective" in names else ()
        known.append(Collective(groups, links, changes="delta" in before))
    if mapper is not None:
        known.append(DeviceMemory(mapper, shared))
    found = {transport.name: transport for transport in known}
    return [found[name] for name in names if name in found]


async def receive_weights(
    store: WeightStore,
    run: str,
    version: common_pb2.PolicyVersion,
    manifest: common_pb2.WeightManifest,
    sources: Iterable[common_pb2.WeightSource],
    *,
    token: str | None,
    transports: Sequence[Transport] = (),
) -> ReceivedWeights:
    """Takes a version by the first transport and from the first source that delivers it whole; `store` holds it then.

    `transports`, best first, are by default shared memory and whole bodies over gRPC; those within a host come before
    the others. One that fails is logged, named in `fallbacks`, and the next one is tried.

    Raises ServiceError INVALID or DIGEST_MISMATCH for a manifest that contradicts itself or the version,
    CONFLICT when the store holds other weights under the number, and when every source failed
    DIGEST_MISMATCH (the bytes were wrong somewhere) or WEIGHTS_UNAVAILABLE.
    """
    check_manifest(version, manifest)
    held = store.find(run, version.number)
    if held is not None:
        return _already_held(held, version)
    wanted, offers = Wanted(run, version, manifest, tuple(store.versions(run))), list(sources)
    attempt = Attempt(token, Turn(-1))
    ways = transports or byte_transports()
    received = await _first([way for way in ways if way.links is None], store, wanted, offers, attempt)
    over_network = [way for way in ways if way.links is not None]
    if received is None and over_network and offers:
        received = await _once_a_host(over_network, store, wanted, offers, attempt)
    if received is None:
        raise _nothing_worked(run, version, attempt.failures)
    return received


async def _once_a_host(
    ways: Sequence[Transport],
    store: WeightStore,
    wanted: Wanted,
    offers: Sequence[common_pb2.WeightSource],
    attempt: Attempt,
) -> ReceivedWeights | None:
    """What comes over the network when it is this instance's turn; else what another one of the host has."""
    run, version = wanted.run, wanted.version
    async with host_turn(store, run, version.number) as turn:
        held = store.find(run, version.number)
        if held is not None:
            return _already_held(held, version)
        received, landed = None, turn.landed()
        if landed is not None:
            received = await _first([SharedMemory()], store, wanted, [landed], attempt)
            if received is not None:
                return received
        turn.say(common_pb2.WeightSource(address=store.address, incarnation=store.incarnation))
        attempt.turn = turn
        for source in offers:
            if received is None and source.parts:
                received = await _in_parts(ways, store, wanted, source, attempt)
        if received is None:
            received = await _first(ways, store, wanted, offers, attempt)
        if received is not None:
            turn.say(store.source(run, version.number))
        return received


async def _in_parts(
    ways: Sequence[Transport],
    store: WeightStore,
    wanted: Wanted,
    source: common_pb2.WeightSource,
    attempt: Attempt,
) -> ReceivedWeights | None:
    """The version from the ranks that have its parts, from all at once; each part has a next way of its own."""
    body = None
    with attempt.noting("parts", source):
        body = PartedBody(store, wanted, source)
    if body is None:
        return None
    try:
        found = await asyncio.gather(
            *(_brought(ways, store, part, [own], attempt) for part, own in body.parts)
        )
    except BaseException:
        body.discard()
        raise
    brought = [part for part in found if part is not None]
    if len(brought) < len(found):
        body.discard()
        return None
    slowest = max(brought, key=lambda part: part.seconds)
    alike = len({(part.way.name, part.found.changes) for part in brought}) == 1
    moved = sum(part.found.moved for part in brought)
    whole = Found(body.publish(), moved, slowest.found.changes)
    return _received(_Brought(slowest.way, whole, slowest.seconds), attempt, measured=alike)


async def _first(
    ways: Sequence[Transport],
    store: WeightStore,
    wanted: Wanted,
    sources: Sequence[common_pb2.WeightSource],
    attempt: Attempt,
) -> ReceivedWeights | None:
    """The version by the first of these ways; None where none of them brought it."""
    brought = await _brought(ways, store, wanted, sources, attempt)
    return None if brought is None else _received(brought, attempt)


@dataclass(frozen=True)
class _Brought:
    way: Transport
    found: Found
    seconds: float


def _received(brought: _Brought, attempt: Attempt, *, measured: bool = True) -> ReceivedWeights:
    way, found = brought.way, brought.found
    if way.links is not None and measured:
        way.links.took(len(found.stored.body), brought.seconds, changes=found.changes)
    WEIGHT_VERSIONS.labels(way.name).inc()
    WEIGHT_BYTES.labels(way.name).inc(found.moved)
    why = [failure.message for failure in attempt.failures]
    return ReceivedWeights(found.stored.body, way.kind, found.moved, why, found.stored.path)


async def _brought(
    ways: Sequence[Transport],
    store: WeightStore,
    wanted: Wanted,
    sources: Sequence[common_pb2.WeightSource],
    attempt: Attempt,
) -> _Brought | None:
    """A version, or a part of one, by the first of these ways."""
    for way in ways:
        offers = []
        for source in sources:
            with attempt.noting(way.name, source):
                if way.offered(wanted, source):
                    offers.append(source)
        if not offers:
            continue
        found, started = None, time.perf_counter()
        with attempt.noting(way.name, offers[0]):
            await failpoint(f"weights.{way.name}")
            found = await way.take(store, wanted, offers, attempt)
        if found is not None:
            return _Brought(way, found, time.perf_counter() - started)
    return None


def check_manifest(version: common_pb2.PolicyVersion, manifest: common_pb2.WeightManifest) -> None:
    """Refuses a manifest whose entries, sizes or digests contradict each other or the version."""
    if not manifest.entries:
        raise _invalid("manifest.entries: a version has at least one tensor")
    layout = layout_of(manifest)
    if sum(tensor_bytes(data_type, shape) for _, data_type, shape in layout) > MAX_TENSOR_BYTES:
        raise _invalid(f"manifest.entries: more than {MAX_TENSOR_BYTES} bytes together")
    for entry, expected in zip(manifest.entries, entries_of(layout), strict=True):
        if (entry.offset_bytes, entry.size_bytes) != (expected.offset_bytes, expected.size_bytes):
            raise _invalid(f"tensor {entry.name}: offset or size does not follow from its type and shape")
    if manifest.size_bytes != sum(entry.size_bytes for entry in manifest.entries):
        raise _invalid(f"the manifest says {manifest.size_bytes} bytes, its entries say otherwise")
    own = manifest_digest(manifest.entries, manifest.adapter)
    if manifest.digest != own or version.digest != manifest.digest:
        raise _mismatch(f"version {version.number}: its digest is not that of the manifest's entries")


def _already_held(held: StoredWeights, version: common_pb2.PolicyVersion) -> ReceivedWeights:
    if held.version.digest != version.digest:
        raise ServiceError(
            grpc.StatusCode.ALREADY_EXISTS,
            "CONFLICT",
            f"version {version.number} is held with digest {held.version.digest}, not {version.digest}",
        )
    return ReceivedWeights(held.body, common_pb2.WEIGHT_TRANSPORT_UNSPECIFIED, 0, path=held.path)


def _prove_same_host(source: common_pb2.WeightSource) -> None:
    """Two hosts may have the same path; only one has the nonce that the source made up."""
    # The path comes from outside: a pipe there must not make this wait.
    handle = os.open(source.shm_nonce_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        content = file.read(_NONCE_BYTES)
    if not source.shm_nonce or content != source.shm_nonce.encode():
        raise ValueError("the nonce file holds another nonce: not the same host")


def _verify(body: memoryview, manifest: common_pb2.WeightManifest) -> None:
    for entry in manifest.entries:
        with body[entry.offset_bytes : entry.offset_bytes + entry.size_bytes] as part:
            if digest_bytes(part) != entry.digest:
                raise _mismatch(f"tensor {entry.name}: the bytes are not those of the manifest")


def _nothing_worked(
    run: str, version: common_pb2.PolicyVersion, failures: list[ServiceError]
) -> ServiceError:
    wrong = any(failure.reason == "DIGEST_MISMATCH" for failure in failures)
    reasons = (
        " | ".join(failure.message for failure in failures) or "no source offers a transport that is used"
    )
    message = f"version {version.number} of {run} could not be taken from any source: {reasons}"
    if wrong:
        return ServiceError(grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH", message)
    exhausted = any(failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED for failure in failures)
    if exhausted:
        return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_SPACE", message)
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "WEIGHTS_UNAVAILABLE", message)


def _not_served(what: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED", f"this instance has no {what}")


def _invalid(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)


def _mismatch(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH", message)
