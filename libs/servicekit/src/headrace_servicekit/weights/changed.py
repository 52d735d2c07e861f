"""A version by what has changed against another one that the receiver holds, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2
from typing_extensions import override

from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import ServiceError, message_of
from headrace_servicekit.weights.delta import BadChange, ChangedBody, Changes
from headrace_servicekit.weights.pending import StoredWeights
from headrace_servicekit.weights.pulling import unavailable
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.transports import Attempt, Found, Links, OneSource, Wanted, base_of

WINDOW_BYTES = 8 * 1024 * 1024
IDLE_TIMEOUT_S = 30.0
_FETCH = "/headrace.common.v1.WeightService/FetchChanges"


class ChangedElements(OneSource):
    """Makes a version of its base and its changes, and hands the changes on to others."""

    name = "delta"
    kind = common_pb2.WEIGHT_TRANSPORT_DELTA

    def __init__(self, links: Links) -> None:
        self.links = links

    def offered(self, wanted: Wanted, source: common_pb2.WeightSource) -> bool:
        """Where it is the quicker way. Raises ServiceError BASE_NOT_HELD for a receiver of another base."""
        if not source.delta_bases or not source.address or not wanted.held:
            return False  # a first version, or a source without any other
        if not self.links.wants_changes():
            return False
        if base_of(wanted, source) is None:
            held = ", ".join(f"{each.version.number} ({each.version.digest})" for each in wanted.held)
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "BASE_NOT_HELD",
                f"the changes are against {', '.join(source.delta_bases)}, and here is {held}",
            )
        return True

    @override
    async def take_from(
        self, source: common_pb2.WeightSource, store: WeightStore, wanted: Wanted, attempt: Attempt
    ) -> Found:
        """Fetches the changes."""
        base = base_of(wanted, source)
        assert base is not None
        with ChangedVersion(store, wanted, base) as made:
            async for response in _responses(wanted, base, source, attempt.token, made.body):
                await made.add(response)
                attempt.turn.goes_on()
            return made.publish()


class ChangedVersion:
    """A version that is made of its base, and of changes as they come; what is not published is thrown away."""

    def __init__(self, store: WeightStore, wanted: Wanted, base: StoredWeights) -> None:
        self._store, self._wanted, self._base = store, wanted, base
        self._pending = wanted.begin(store)
        self._kept: dict[int, weights_pb2.FetchChangesResponse] = {}
        self.body = ChangedBody(wanted.manifest, base.body, self._pending.whole())

    def __enter__(self) -> ChangedVersion:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            self._pending.discard()

    async def add(self, response: weights_pb2.FetchChangesResponse) -> None:
        """The next changes. Raises ServiceError DIGEST_MISMATCH, naming the tensor."""
        self._kept[self.body.offset] = response
        adding = asyncio.ensure_future(asyncio.to_thread(self.body.add, response))
        try:
            await asyncio.shield(adding)
        except asyncio.CancelledError:
            await asyncio.wait({adding})  # Else it would write on, into what another way brings.
            raise
        except BadChange as error:
            raise ServiceError(grpc.StatusCode.DATA_LOSS, "DIGEST_MISMATCH", str(error)) from error

    def publish(self) -> Found:
        """The version, whole. Raises ServiceError for changes that ended before it was."""
        if self.body.offset < self.body.size:
            raise unavailable(f"the changes ended at byte {self.body.offset} of {self.body.size}")
        self.body.release()
        manifest = self._wanted.manifest
        stored = self._pending.publish(self._wanted.version, manifest)
        moved = sum(response.ByteSize() for response in self._kept.values())
        if 2 * moved <= manifest.size_bytes:
            changes = Changes(manifest, stored.body, None, self._base.version.digest, made=self._kept)
            self._wanted.keep_changes(self._store, changes)
        return Found(stored, moved, changes=True)


async def _responses(
    wanted: Wanted,
    base: StoredWeights,
    source: common_pb2.WeightSource,
    token: str | None,
    body: ChangedBody,
) -> AsyncIterator[weights_pb2.FetchChangesResponse]:
    """Changes until the body is whole; a stream that breaks after it made progress goes on there."""
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
                        raise unavailable(f"the stream ended at byte {body.offset} of {body.size}")
                    yield response
            except TimeoutError as error:
                raise unavailable(
                    f"{source.address} sent nothing for {IDLE_TIMEOUT_S:.0f} s at byte {body.offset}"
                ) from error
            except grpc.aio.AioRpcError as error:
                if body.offset == request.offset_bytes:
                    raise unavailable(f"{source.address}: {message_of(error)}") from error
            finally:
                call.cancel()
