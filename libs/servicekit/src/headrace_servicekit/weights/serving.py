"""A store's side of all ways: WeightService."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from headrace.common.v1 import weights_pb2, weights_pb2_grpc

from headrace_servicekit.rpc.errors import ServiceError, invalid
from headrace_servicekit.weights.arrivals import CHUNK_BYTES, POLL_S, holder_of, lacking
from headrace_servicekit.weights.broadcasts import BroadcastSource
from headrace_servicekit.weights.collective import Groups
from headrace_servicekit.weights.cuda_ipc import Lender, MemorySource
from headrace_servicekit.weights.store import WeightStore

BEGIN_S = 5.0
"""How long a relay waits for a version to begin arriving."""
Context = grpc.aio.ServicerContext[Any, Any]


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """headrace.common.v1.WeightService over a store."""

    def __init__(
        self, store: WeightStore, groups: Groups | None = None, lender: Lender | None = None
    ) -> None:
        self._store = store
        self._memory = MemorySource(store, lender) if lender is not None else None
        self._broadcasts = BroadcastSource(store, groups) if groups is not None else None

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        """Returns the manifest of a held version."""
        stored = self._store.get(request.run, request.number)
        return weights_pb2.GetManifestResponse(
            version=stored.version,
            manifest=stored.manifest,
            source=self._store.source(request.run, request.number),
        )

    async def FetchWeights(
        self, request: weights_pb2.FetchWeightsRequest, context: Context
    ) -> AsyncIterator[weights_pb2.FetchWeightsResponse]:
        """Streams pieces of 1 MiB at most, or changes, of which each stretch is coded while the one before is sent.

        The version stays alive until the stream ends.
        """
        if not request.base_digest:
            async for offset, data in self._pieces(request):
                yield weights_pb2.FetchWeightsResponse(offset_bytes=offset, data=data)
            return
        changes = self._store.changes(request.run, request.number, request.base_digest)
        offsets = [offset for offset in changes.offsets if offset >= request.offset_bytes]
        if request.offset_bytes and request.offset_bytes not in offsets:
            raise invalid(f"offset {request.offset_bytes} is no end of a response")
        for offset in offsets:
            yield await changes.response(offset)

    async def JoinBroadcast(
        self, request: weights_pb2.JoinBroadcastRequest, context: Context
    ) -> AsyncIterator[weights_pb2.JoinBroadcastResponse]:
        """A seat in a broadcast of a held version; the stream ends with it."""
        if self._broadcasts is None:
            raise _not_served("broadcasts")
        async for seat in self._broadcasts.join(request):
            yield seat

    async def ShareDeviceMemory(
        self, request: weights_pb2.ShareDeviceMemoryRequest, context: Context
    ) -> AsyncIterator[weights_pb2.ShareDeviceMemoryResponse]:
        """Lends the copy of a held version on this process's GPU until the call ends."""
        if self._memory is None:
            raise _not_served("memory of a GPU to lend")
        async for lent in self._memory.share(request):
            yield lent

    async def _pieces(self, request: weights_pb2.FetchWeightsRequest) -> AsyncIterator[tuple[int, bytes]]:
        """(offset, data) of what is asked for; of a relay also while it arrives, and b"" as a sign of life.

        Raises ServiceError NOT_FOUND, INVALID, and ELSEWHERE with the address of the host's instance that pulls it.
        """
        store, run, number = self._store, request.run, request.number
        if request.relay:
            await self._begun(run, number)
        arrival = store.arriving(run, number) if request.relay else None
        stored = None
        entries = arrival.entries if arrival is not None else store.get(run, number).manifest.entries
        for offset, end in lacking(entries, request.held, request.offset_bytes):
            while offset < end:
                data = await arrival.read(offset) if arrival is not None else None
                if data is None:
                    arrival, stored = None, stored or store.get(run, number)
                    data = bytes(stored.body[offset : offset + CHUNK_BYTES])
                data = data[: end - offset]
                yield offset, data
                offset += len(data)

    async def _begun(self, run: str, number: int) -> None:
        """Returns when the version is here or arrives, or after BEGIN_S. Raises ServiceError ELSEWHERE."""
        store, deadline = self._store, time.monotonic() + BEGIN_S
        while store.find(run, number) is None and store.arriving(run, number) is None:
            holder = holder_of(store.turn_path(run, number))
            if holder.address and holder.incarnation != store.incarnation:
                raise ServiceError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    "ELSEWHERE",
                    f"version {number} of {run} came to this host at {holder.address}",
                    address=holder.address,
                )
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(POLL_S)


def _not_served(what: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED", f"this instance has no {what}")
