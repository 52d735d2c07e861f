"""Weights between hosts and processes: a servicer, and a receiver that negotiates how a version comes to it.

All or nothing: a body is handed out only when every tensor's digest is the manifest's. A transport that fails leads to
the next one in the same call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc

from headrace_servicekit.failpoints import failpoint
from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.digests import RunningDigest, digest_bytes, manifest_digest
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.rpc.tensors import MAX_TENSOR_BYTES, tensor_bytes
from headrace_servicekit.weights.delta import BadChange, ChangedBody, Changes
from headrace_servicekit.weights.store import StoredWeights, WeightStore, entries_of
from headrace_servicekit.weights.transports import Links, Transport, Wanted

log = logging.getLogger(__name__)

CHUNK_BYTES = 1024 * 1024
WINDOW_BYTES = 8 * 1024 * 1024
IDLE_TIMEOUT_S = 30.0
_NONCE_BYTES = 256
_FETCH = "/headrace.common.v1.WeightService/FetchWeights"
_FETCH_CHANGES = "/headrace.common.v1.WeightService/FetchChanges"


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

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights_pb2.GetManifestResponse:
        """Returns the manifest of a held version."""
        stored = self._store.get(request.run, request.number)
        return weights_pb2.GetManifestResponse(version=stored.version, manifest=stored.manifest)

    async def FetchWeights(
        self, request: weights_pb2.FetchWeightsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[weights_pb2.FetchWeightsResponse]:
        """Streams the body from an offset in 1 MiB pieces; the version stays alive until the stream ends."""
        body = self._store.get(request.run, request.number).body
        if request.offset_bytes > len(body):
            raise _invalid(f"offset {request.offset_bytes} is beyond the body's {len(body)} bytes")
        for offset in range(request.offset_bytes, len(body), CHUNK_BYTES):
            piece = bytes(body[offset : offset + CHUNK_BYTES])
            yield weights_pb2.FetchWeightsResponse(offset_bytes=offset, data=piece)

    async def FetchChanges(
        self, request: weights_pb2.FetchChangesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[weights_pb2.FetchChangesResponse]:
        """Streams what has changed from an offset on; each stretch is found while the one before is sent."""
        changes = self._store.changes(request.run, request.number, request.base_digest)
        offsets = [offset for offset in changes.offsets if offset >= request.offset_bytes]
        if request.offset_bytes and request.offset_bytes not in offsets:
            raise _invalid(f"offset {request.offset_bytes} is no end of a response")
        for offset in offsets:
            yield await changes.response(offset)


class SharedMemory:
    """The producer's file on a tmpfs of this host, mapped: no byte is moved."""

    name = "shm"
    kind = common_pb2.WEIGHT_TRANSPORT_SHM

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Where the source has a file; whether it is of this host is found out."""
        return self.kind in source.transports

    async def take(
        self, store: WeightStore, wanted: Wanted, source: common_pb2.WeightSource, token: str | None
    ) -> tuple[StoredWeights, int]:
        """Maps and verifies it."""
        return await _map_shared(store, wanted.run, wanted.version, wanted.manifest, source), 0

    def took(self, wanted: Wanted, source: common_pb2.WeightSource, seconds: float) -> None:
        """There is no other way to compare with."""


class WholeBody:
    """Streamed over gRPC in pieces; works everywhere."""

    name = "grpc"
    kind = common_pb2.WEIGHT_TRANSPORT_GRPC

    def __init__(self, links: Links) -> None:
        self._links = links

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Where the source serves it."""
        return self.kind in source.transports

    async def take(
        self, store: WeightStore, wanted: Wanted, source: common_pb2.WeightSource, token: str | None
    ) -> tuple[StoredWeights, int]:
        """Fetches and verifies it."""
        stored = await _fetch(store, wanted.run, wanted.version, wanted.manifest, source, token)
        return stored, wanted.manifest.size_bytes

    def took(self, wanted: Wanted, source: common_pb2.WeightSource, seconds: float) -> None:
        """Measures the link."""
        self._links.took(source.address, wanted.manifest.size_bytes, seconds, changes=False)


class ChangedElements:
    """What has changed against a version that the receiver holds, over gRPC."""

    name = "delta"
    kind = common_pb2.WEIGHT_TRANSPORT_DELTA

    def __init__(self, links: Links) -> None:
        self._links = links

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Where it is the quicker way. Raises ServiceError BASE_NOT_HELD for a receiver of another base."""
        if not source.delta_bases or not source.address or not wanted.held:
            return False  # a first version, or a source without any other
        if not self._links.wants_changes(source.address):
            return False
        if _base(wanted, source) is None:
            held = ", ".join(f"{each.version.number} ({each.version.digest})" for each in wanted.held)
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "BASE_NOT_HELD",
                f"the changes are against {', '.join(source.delta_bases)}, and here is {held}",
            )
        return True

    async def take(
        self, store: WeightStore, wanted: Wanted, source: common_pb2.WeightSource, token: str | None
    ) -> tuple[StoredWeights, int]:
        """Fetches the changes and makes the version of them and of its base."""
        base = _base(wanted, source)
        assert base is not None
        return await _fetch_changes(store, wanted, base, source, token)

    def took(self, wanted: Wanted, source: common_pb2.WeightSource, seconds: float) -> None:
        """Measures the link."""
        self._links.took(source.address, wanted.manifest.size_bytes, seconds, changes=True)


def _base(wanted: Wanted, source: common_pb2.WeightSource) -> StoredWeights | None:
    """The newest version that is held and from which the source tells changes."""
    fit = [
        held
        for held in wanted.held
        if held.version.digest in source.delta_bases and len(held.body) == wanted.manifest.size_bytes
    ]
    return max(fit, key=lambda held: held.version.number, default=None)


def byte_transports(names: Sequence[str] = ("shm", "grpc"), links: Links | None = None) -> list[Transport]:
    """The transports of these names that move bytes of a host's memory, in the order given."""
    links = links or Links()
    known: list[Transport] = [SharedMemory(), WholeBody(links), ChangedElements(links)]
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

    `transports`, best first, are by default shared memory and whole bodies over gRPC. One that fails is logged, named
    in `fallbacks`, and the next one is tried.

    Raises ServiceError INVALID or DIGEST_MISMATCH for a manifest that contradicts itself or the version,
    CONFLICT when the store holds other weights under the number, and when every source failed
    DIGEST_MISMATCH (the bytes were wrong somewhere) or WEIGHTS_UNAVAILABLE.
    """
    check_manifest(version, manifest)
    held = store.find(run, version.number)
    if held is not None:
        return _already_held(held, version)
    wanted, offers = Wanted(run, version, manifest, tuple(store.versions(run))), list(sources)
    failures: list[ServiceError] = []
    for transport in transports or byte_transports():
        for source in offers:
            started = time.perf_counter()
            try:
                if not transport.offered(wanted, source):
                    continue
                await failpoint(f"weights.{transport.name}")
                stored, moved = await transport.take(store, wanted, source, token)
            except ServiceError as failure:
                failure.message = f"{transport.name} from {source.incarnation}: {failure.message}"
                log.warning("version %d of %s: %s", version.number, run, failure.message)
                failures.append(failure)
            else:
                transport.took(wanted, source, time.perf_counter() - started)
                why = [failure.message for failure in failures]
                return ReceivedWeights(stored.body, transport.kind, moved, why, stored.path)
    raise _nothing_worked(run, version, failures)


def check_manifest(version: common_pb2.PolicyVersion, manifest: common_pb2.WeightManifest) -> None:
    """Refuses a manifest whose entries, sizes or digests contradict each other or the version."""
    if not manifest.entries:
        raise _invalid("manifest.entries: a version has at least one tensor")
    layout = [(entry.name, entry.data_type, tuple(entry.shape)) for entry in manifest.entries]
    if sum(tensor_bytes(data_type, shape) for _, data_type, shape in layout) > MAX_TENSOR_BYTES:
        raise _invalid(f"manifest.entries: more than {MAX_TENSOR_BYTES} bytes together")
    for entry, expected in zip(manifest.entries, entries_of(layout), strict=True):
        if (entry.offset_bytes, entry.size_bytes) != (expected.offset_bytes, expected.size_bytes):
            raise _invalid(f"tensor {entry.name}: offset or size does not follow from its type and shape")
    if manifest.size_bytes != sum(entry.size_bytes for entry in manifest.entries):
        raise _invalid(f"the manifest says {manifest.size_bytes} bytes, its entries say otherwise")
    if manifest.digest != manifest_digest(manifest.entries) or version.digest != manifest.digest:
        raise _mismatch(f"version {version.number}: its digest is not that of the manifest's entries")


def _already_held(held: StoredWeights, version: common_pb2.PolicyVersion) -> ReceivedWeights:
    if held.version.digest != version.digest:
        raise ServiceError(
            grpc.StatusCode.ALREADY_EXISTS,
            "CONFLICT",
            f"version {version.number} is held with digest {held.version.digest}, not {version.digest}",
        )
    return ReceivedWeights(held.body, common_pb2.WEIGHT_TRANSPORT_UNSPECIFIED, 0, path=held.path)


async def _map_shared(
    store: WeightStore,
    run: str,
    version: common_pb2.PolicyVersion,
    manifest: common_pb2.WeightManifest,
    source: common_pb2.WeightSource,
) -> StoredWeights:
    path = Path(source.shm_path)
    try:
        _prove_same_host(source)
        segment = store.map_shared(path, manifest.size_bytes)
        body = segment.lend()
    except BlockingIOError as error:
        raise _unavailable(f"{path} is being written with another version") from error
    except (OSError, ValueError) as error:
        raise _unavailable(str(error)) from error
    await asyncio.to_thread(_verify, body, manifest)
    return store.adopt(run, version, manifest, path, segment, body)


def _prove_same_host(source: common_pb2.WeightSource) -> None:
    """Two hosts may have the same path; only one has the nonce that the source made up."""
    # The path comes from outside: a pipe there must not make this wait.
    handle = os.open(source.shm_nonce_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:
        content = file.read(_NONCE_BYTES)
    if not source.shm_nonce or content != source.shm_nonce.encode():
        raise ValueError("the nonce file holds another nonce: not the same host")


async def _fetch(
    store: WeightStore,
    run: str,
    version: common_pb2.PolicyVersion,
    manifest: common_pb2.WeightManifest,
    source: common_pb2.WeightSource,
    token: str | None,
) -> StoredWeights:
    layout = [(entry.name, entry.data_type, tuple(entry.shape)) for entry in manifest.entries]
    pending = store.begin(run, version.number, layout)
    try:
        body = _Body(pending.whole(), manifest.entries)
        await _download(body, run, version.number, source.address, token)
        body.release()
        return pending.publish(version, manifest)
    except (ServiceError, asyncio.CancelledError):
        pending.discard()
        raise


async def _fetch_changes(
    store: WeightStore,
    wanted: Wanted,
    base: StoredWeights,
    source: common_pb2.WeightSource,
    token: str | None,
) -> tuple[StoredWeights, int]:
    """The version, made of its base and changes, which others of this receiver may have then; and their bytes."""
    run, version, manifest = wanted.run, wanted.version, wanted.manifest
    layout = [(entry.name, entry.data_type, tuple(entry.shape)) for entry in manifest.entries]
    pending = store.begin(run, version.number, layout)
    try:
        body = ChangedBody(manifest, base.body, pending.whole())
        moved = 0
        kept: dict[int, weights_pb2.FetchChangesResponse] = {}
        async with dial(source.address, token=token, window_bytes=WINDOW_BYTES) as channel:
            stub: Any = weights_pb2_grpc.WeightServiceStub(channel)
            request = weights_pb2.FetchChangesRequest(
                run=run, number=version.number, base_digest=base.version.digest
            )
            while body.offset < body.size:
                began = request.offset_bytes = body.offset
                call = stub.FetchChanges(request)
                try:
                    async for response in _responses(call):
                        kept[body.offset] = response
                        moved += response.ByteSize()
                        await asyncio.to_thread(body.add, response)
                except TimeoutError as error:
                    raise _unavailable(
                        f"{source.address} sent nothing for {IDLE_TIMEOUT_S:.0f} s at byte {body.offset}"
                    ) from error
                except grpc.aio.AioRpcError as error:
                    if body.offset == began:
                        raise _unavailable(f"{source.address}: {message_of(error)}") from error
                else:
                    if body.offset < body.size:
                        raise _unavailable(f"the stream ended at byte {body.offset} of {body.size}")
                finally:
                    call.cancel()
        body.release()
        stored = pending.publish(version, manifest)
    except BadChange as error:
        pending.discard()
        raise _mismatch(str(error)) from error
    except (ServiceError, asyncio.CancelledError):
        pending.discard()
        raise
    if 2 * moved <= manifest.size_bytes:
        changes = Changes(manifest, stored.body, None, base.version.digest, made=kept)
        store.keep_changes(run, version.number, changes)
    return stored, moved


async def _responses(call: Any) -> AsyncIterator[weights_pb2.FetchChangesResponse]:
    """What a stream brings. Raises TimeoutError where nothing comes for IDLE_TIMEOUT_S."""
    while True:
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            response = await call.read()
        if not isinstance(response, weights_pb2.FetchChangesResponse):  # grpc.aio.EOF
            return
        yield response


class _Body:
    """A body that fills from its beginning; each tensor's digest is checked while its bytes are in the cache."""

    def __init__(self, whole: memoryview, entries: Sequence[common_pb2.WeightEntry]) -> None:
        self.size = len(whole)
        self.offset = 0
        self._whole = whole
        self._entries = iter(entries)
        self._entry = next(self._entries)
        self._digest = RunningDigest()

    def add(self, data: memoryview) -> None:
        """The next piece. Raises ServiceError DIGEST_MISMATCH at a tensor's end."""
        self._whole[self.offset : self.offset + len(data)] = data
        self.offset += len(data)
        while True:
            left = self._entry.offset_bytes + self._entry.size_bytes - (self.offset - len(data))
            self._digest.update(data[:left])
            if len(data) < left:
                return
            self._close_entry()
            data = data[left:]
            following = next(self._entries, None)
            if following is None:
                return
            self._entry, self._digest = following, RunningDigest()

    def _close_entry(self) -> None:
        if self._digest.hexdigest() != self._entry.digest:
            raise _mismatch(f"tensor {self._entry.name}: the bytes are not those of the manifest")

    def release(self) -> None:
        """Releases the view of the memory."""
        self._whole.release()


async def _download(body: _Body, run: str, number: int, address: str, token: str | None) -> None:
    """Fills the body, going on at the offset reached when a stream breaks after it made progress."""
    async with dial(address, token=token, window_bytes=WINDOW_BYTES) as channel:
        fetch = channel.unary_stream(
            _FETCH,
            request_serializer=weights_pb2.FetchWeightsRequest.SerializeToString,
            response_deserializer=split_piece,
        )
        while body.offset < body.size:
            began = body.offset
            call = fetch(weights_pb2.FetchWeightsRequest(run=run, number=number, offset_bytes=began))
            try:
                await _drain_into(body, call)
            except TimeoutError as error:
                raise _unavailable(
                    f"{address} sent nothing for {IDLE_TIMEOUT_S:.0f} s at byte {body.offset}"
                ) from error
            except grpc.aio.AioRpcError as error:
                if body.offset == began:
                    raise _unavailable(f"{address}: {message_of(error)}") from error
            finally:
                call.cancel()


Piece = tuple[int, memoryview]


def split_piece(message: bytes) -> Piece:
    """(offset, data) of a serialised FetchWeightsResponse, without copying the data."""
    view, offset = memoryview(message), 0
    # What every protobuf writes: field 1, a varint, unless it is 0; field 2, its length and its bytes.
    position = 0
    if message[:1] == b"\x08":
        offset, position = _varint(message, 1)
    if message[position : position + 1] == b"\x12":
        size, position = _varint(message, position + 1)
        if position + size == len(message):
            return offset, view[position:]
    parsed = weights_pb2.FetchWeightsResponse.FromString(message)
    return parsed.offset_bytes, memoryview(parsed.data)


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """A varint and the position behind it."""
    value = shift = 0
    for index in range(position, min(position + 10, len(message))):
        value |= (message[index] & 0x7F) << shift
        if message[index] < 0x80:
            return value, index + 1
        shift += 7
    return 0, len(message)


async def _drain_into(body: _Body, call: grpc.aio.UnaryStreamCall[Any, Piece]) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_TIMEOUT_S) as idle:
        while body.offset < body.size:
            piece = await call.read()
            if not isinstance(piece, tuple):  # grpc.aio.EOF
                raise _unavailable(f"the stream ended at byte {body.offset} of {body.size}")
            offset, data = piece
            if offset != body.offset or not data or offset + len(data) > body.size:
                raise _unavailable(f"a piece of {len(data)} bytes at {offset}, expected one at {body.offset}")
            body.add(data)
            idle.reschedule(loop.time() + IDLE_TIMEOUT_S)


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


def _invalid(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message)


def _mismatch(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH", message)


def _unavailable(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "WEIGHTS_UNAVAILABLE", message)
