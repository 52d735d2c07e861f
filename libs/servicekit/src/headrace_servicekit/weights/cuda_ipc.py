"""A version in the memory of the source's GPU, mapped by an engine of the same host: both of its sides.

The receiver maps the source's file as with shared memory, and beside it the copy on the GPU, so that a swap copies from
device to device. The copy is lent for as long as the receiver's call is open. Knows no torch: `Lender` and `Mapper` are
its parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import grpc
import grpc.aio
from headrace.common.v1 import common_pb2, weights_pb2, weights_pb2_grpc
from typing_extensions import override

from headrace_servicekit.rpc.client import dial
from headrace_servicekit.rpc.errors import message_of
from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import LentMemory, mismatch, unavailable
from headrace_servicekit.weights.ways import Attempt, Found, Way, withheld

LEND_S = 60.0
WITHDRAWN_S = 0.05
"""How soon a receiver hears that the memory is gone; torch keeps it mapped for those that read it."""
Places = Sequence[tuple[int, int]]


class Lender(Protocol):
    """The source's memory; calls block, and raise RuntimeError."""

    def why_not(self) -> str: ...

    def lend(self, key: Any, body: memoryview, places: Places) -> tuple[Any, Any]: ...

    def lends(self, copy: Any) -> bool: ...

    def give_back(self, copy: Any) -> None: ...


class Mapper(Protocol):
    """The receiver's; `open` blocks, and raises RuntimeError, or ValueError with the index of a wrong tensor.

    It returns None where the engine's own processes map.
    """

    def why_not(self) -> str: ...

    def open(self, handle: Any, places: Places, sums: Sequence[int]) -> Any: ...


class MemorySource:
    """Lends the versions of a store."""

    def __init__(self, store: WeightStore, lender: Lender) -> None:
        self._store, self._lender = store, lender
        store.ways[DeviceMemory.kind] = lender.why_not

    async def share(
        self, request: weights_pb2.ShareDeviceMemoryRequest
    ) -> AsyncIterator[weights_pb2.ShareDeviceMemoryResponse]:
        """One response; the memory is lent until the call ends. Raises ServiceError NOT_FOUND, UNAVAILABLE."""
        key = request.run, request.number
        stored = self._store.get(*key)
        places = places_of(stored.manifest)
        lending = asyncio.ensure_future(asyncio.to_thread(self._lender.lend, key, stored.body, places))
        try:
            copy, handle = await asyncio.shield(lending)
        except RuntimeError as error:
            raise unavailable(str(error)) from error
        except asyncio.CancelledError:  # The caller has gone, and the thread makes the copy all the same.
            lending.add_done_callback(self._unused)
            raise
        try:
            yield weights_pb2.ShareDeviceMemoryResponse(**asdict(handle), sums=copy.sums)
            while True:
                await asyncio.sleep(WITHDRAWN_S)
                if not self._lender.lends(copy):
                    raise unavailable("the GPU is not the source's any more")
        finally:
            self._lender.give_back(copy)

    def _unused(self, lending: asyncio.Future[tuple[Any, Any]]) -> None:
        if lending.exception() is None:
            self._lender.give_back(lending.result()[0])


class DeviceMemory(Way):
    """The source's copy on a GPU of this host, mapped: no byte is moved before the swap. `shared` maps its file."""

    name = "cuda_ipc"
    kind = common_pb2.WEIGHT_TRANSPORT_CUDA_IPC

    def __init__(self, mapper: Mapper, shared: Way) -> None:
        self._mapper, self._shared = mapper, shared

    @override
    def offered(self, attempt: Attempt, source: common_pb2.WeightSource) -> bool:
        """Where both sides have GPUs. Raises ServiceError WITHHELD with the reason of the side that has none."""
        found = super().offered(attempt, source)
        if found and (reason := self._mapper.why_not()):
            raise withheld(reason)
        return found

    @override
    async def take_from(self, source: common_pb2.WeightSource, attempt: Attempt) -> Found | None:
        """Maps and verifies both; raises where the source is of another host."""
        lent = await self._borrow(source, attempt)
        try:
            found = await self._shared.take_from(source, attempt)
        except BaseException:
            lent.end()
            raise
        attempt.store.lent[attempt.run, attempt.version.number] = lent
        return found

    async def _borrow(self, source: common_pb2.WeightSource, attempt: Attempt) -> LentMemory:
        request = weights_pb2.ShareDeviceMemoryRequest(run=attempt.run, number=attempt.version.number)
        began: asyncio.Future[weights_pb2.ShareDeviceMemoryResponse] = asyncio.Future()
        lent = LentMemory(asyncio.create_task(_hold(source.address, attempt.token, request, began)))
        try:
            async with asyncio.timeout(LEND_S):
                told = await began
            lent.sums = list(told.sums)
            lent.handle = {
                each.name: getattr(told, each.name) for each in told.DESCRIPTOR.fields if each.name != "sums"
            }
            places = places_of(attempt.manifest)
            lent.memory = await asyncio.to_thread(self._mapper.open, told, places, lent.sums)
        except BaseException as error:
            lent.end()
            if isinstance(error, ValueError):
                name = attempt.manifest.entries[error.args[0]].name
                raise mismatch(f"tensor {name}: the bytes on the GPU are not the source's") from error
            if isinstance(error, grpc.aio.AioRpcError):
                raise unavailable(f"{source.address}: {message_of(error)}") from error
            if isinstance(error, (RuntimeError, TimeoutError)):
                raise unavailable(f"{source.address}: {error or 'no answer'}") from error
            raise
        return lent


async def _hold(
    address: str,
    token: str | None,
    request: weights_pb2.ShareDeviceMemoryRequest,
    began: asyncio.Future[weights_pb2.ShareDeviceMemoryResponse],
) -> None:
    """Keeps the call open until it is cancelled or the source ends it."""
    try:
        async with dial(address, token=token) as channel:
            stub = weights_pb2_grpc.WeightServiceStub(channel)  # type: ignore[no-untyped-call]
            async for response in stub.ShareDeviceMemory(request):
                began.set_result(response)
    except grpc.aio.AioRpcError as error:
        if not began.done():
            began.set_exception(error)
    if not began.done():
        began.set_exception(RuntimeError("the source gave no memory"))


def places_of(manifest: common_pb2.WeightManifest) -> list[tuple[int, int]]:
    """Offset and bytes of each tensor."""
    return [(entry.offset_bytes, entry.size_bytes) for entry in manifest.entries]
