"""A version over gRPC by what has changed against another one that the receiver holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2

from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.weights.delta import BadChange, ChangedBody, Changes
from headrace_servicekit.weights.store import StoredWeights, WeightStore
from headrace_servicekit.weights.transports import Attempt, Found, Links, Wanted

WINDOW_BYTES = 8 * 1024 * 1024
IDLE_TIMEOUT_S = 30.0
_FETCH = "/headrace.common.v1.WeightService/FetchChanges"


class ChangedElements:
    """Makes a version of its base and its changes, and hands the changes on to others."""

    name = "delta"
    kind = common_pb2.WEIGHT_TRANSPORT_DELTA
    local = False

    def __init__(self, links: Links) -> None:
        self._links = links

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Where it is the quicker way. Raises ServiceError BASE_NOT_HELD for a receiver of another base."""
        if not source.delta_bases or not source.address or not wanted.held:
            return False  # a first version, or a source without any other
        if not self._links.wants_changes():
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
        self,
        store: WeightStore,
        wanted: Wanted,
        sources: Sequence[common_pb2.WeightSource],
        attempt: Attempt,
    ) -> Found | None:
        """Fetches the changes from the first source that has them all."""
        for source in sources:
            base = _base(wanted, source)
            assert base is not None
            with attempt.noting(self.name, source):
                return await _fetch(store, wanted, base, source, attempt)
        return None

    def took(self, wanted: Wanted, seconds: float) -> None:
        """Measures the way."""
        self._links.took(wanted.manifest.size_bytes, seconds, changes=True)


def _base(wanted: Wanted, source: common_pb2.WeightSource) -> StoredWeights | None:
    """The newest version that is held and from which the source tells changes."""
    fit = [
        held
        for held in wanted.held
        if held.version.digest in source.delta_bases and len(held.body) == wanted.manifest.size_bytes
    ]
    return max(fit, key=lambda held: held.version.number, default=None)


async def _fetch(
    store: WeightStore,
    wanted: Wanted,
    base: StoredWeights,
    source: common_pb2.WeightSource,
    attempt: Attempt,
) -> Found:
    version, manifest = wanted.version, wanted.manifest
    layout = [(entry.name, entry.data_type, tuple(entry.shape)) for entry in manifest.entries]
    pending = store.begin(wanted.run, version.number, layout)
    kept: dict[int, weights_pb2.FetchChangesResponse] = {}
    try:
        body = ChangedBody(manifest, base.body, pending.whole())
        async for offset, response in _responses(wanted, base, source, attempt.token, body):
            kept[offset] = response
            await asyncio.to_thread(body.add, response)
            attempt.turn.goes_on()
        body.release()
        stored = pending.publish(version, manifest)
    except BadChange as error:
        pending.discard()
        raise ServiceError(grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH", str(error)) from error
    except (ServiceError, asyncio.CancelledError):
        pending.discard()
        raise
    moved = sum(response.ByteSize() for response in kept.values())
    if 2 * moved <= manifest.size_bytes:
        changes = Changes(manifest, stored.body, None, base.version.digest, made=kept)
        store.keep_changes(wanted.run, version.number, changes)
    return stored, moved


async def _responses(
    wanted: Wanted,
    base: StoredWeights,
    source: common_pb2.WeightSource,
    token: str | None,
    body: ChangedBody,
) -> AsyncIterator[tuple[int, weights_pb2.FetchChangesResponse]]:
    """(offset, changes) until the body is whole; a stream that breaks after it made progress goes on there."""
    request = weights_pb2.FetchChangesRequest(
        run=wanted.run, number=wanted.version.number, base_digest=base.version.digest
    )
    async with dial(source.address, token=token, window_bytes=WINDOW_BYTES) as channel:
        fetch = channel.unary_stream(
            _FETCH,
            request_serializer=weights_pb2.FetchChangesRequest.SerializeToString,
            response_deserializer=weights_pb2.FetchChangesResponse.FromString,
        )
        while body.offset < body.size:
            request.offset_bytes = body.offset
            call: Any = fetch(request)
            try:
                while body.offset < body.size:
                    async with asyncio.timeout(IDLE_TIMEOUT_S):
                        response = await call.read()
                    if not isinstance(response, weights_pb2.FetchChangesResponse):  # grpc.aio.EOF
                        raise _unavailable(f"the stream ended at byte {body.offset} of {body.size}")
                    yield body.offset, response
            except TimeoutError as error:
                raise _unavailable(
                    f"{source.address} sent nothing for {IDLE_TIMEOUT_S:.0f} s at byte {body.offset}"
                ) from error
            except grpc.aio.AioRpcError as error:
                if body.offset == request.offset_bytes:
                    raise _unavailable(f"{source.address}: {message_of(error)}") from error
            finally:
                call.cancel()


def _unavailable(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "WEIGHTS_UNAVAILABLE", message)
