"""One stream of samples: reads assignments, hands them on, sends what comes back in batches.

Knows neither text nor robots; Generate and RunEpisodes are its two kinds.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.lease.fence import Fence
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.endpoint.server import Endpoint
from headrace_rollout.moving import MovedCaches
from headrace_rollout.runs.opened import OpenedRun

OutputT = TypeVar("OutputT")
ResponseT = TypeVar("ResponseT")
ItemT = TypeVar("ItemT")

RESPONSE_BYTES = 1 << 20
"""Most bytes of one streamed response."""


class Request(Protocol):
    """A message on the stream: an opening, an assignment or a Reauthorize."""

    @property
    def assign(self) -> rollout_pb2.AssignGroups: ...

    @property
    def reauthorize(self) -> rollout_pb2.Reauthorize: ...


class Opening(Protocol):
    """What holds for the whole stream."""

    @property
    def header(self) -> common_pb2.CommandHeader: ...

    @property
    def policy_number(self) -> int: ...

    @property
    def evaluation(self) -> bool: ...


@dataclass(frozen=True)
class Serving:
    """What a stream needs of its instance: `after_response` is called after each response."""

    producer: str
    fence: Fence
    after_response: Callable[[], None]
    caches: MovedCaches
    endpoint: Endpoint
    """Where agents speak with the policy."""


class Handover(Generic[ItemT]):
    """Hands items of any thread to a function of an event loop, in order: many with one wake of it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[ItemT], None]) -> None:
        self._loop, self._take = loop, take
        self._lock = threading.Lock()
        self._items: list[ItemT] = []

    def put(self, item: ItemT) -> None:
        """Hands an item over."""
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        if first:
            self._loop.call_soon_threadsafe(self._take_all)

    def _take_all(self) -> None:
        with self._lock:
            items, self._items = self._items, []
        for item in items:
            self._take(item)


class Revoked:
    """The stream's lease was revoked, and what its samples had has come back."""


class SampleStream(ABC, Generic[OutputT, ResponseT]):
    """The life of a stream. It serves under the lease of its opening, or of the last Reauthorize."""

    def __init__(self, run: OpenedRun, opening: Opening, serving: Serving) -> None:
        self._run = run
        self._evaluation = opening.evaluation
        self._header = opening.header
        self._serving = serving
        self._outstanding = 0
        self._reading = True
        self._revoked = self._revoking = False
        # Outputs, or None when nothing more will be assigned, or what ends the stream.
        self._inbox: asyncio.Queue[Sequence[OutputT] | ServiceError | Revoked | None] = asyncio.Queue()
        self.ended = asyncio.Event()

    @abstractmethod
    async def _submit(self, request: rollout_pb2.AssignGroups) -> None:
        """Begins what was assigned, and adds the number of samples to `_outstanding` before any can come back."""

    @abstractmethod
    async def _abort(self) -> None:
        """Stops the stream's samples; their partial outputs are in the inbox when it returns, or soon."""

    async def _leave(self) -> None:
        """Ends what was begun for the stream; nothing comes back after it."""
        await self._abort()

    async def _prepared(self, outputs: Sequence[OutputT]) -> Sequence[OutputT]:
        """The outputs as they are sent."""
        return outputs

    @abstractmethod
    def _size(self, output: OutputT) -> int:
        """About the bytes of an output on the wire."""

    @abstractmethod
    def _respond(self, outputs: Sequence[OutputT]) -> ResponseT | None:
        """A response with the outputs; None for nothing to say. Subtracts those that ended from `_outstanding`."""

    @abstractmethod
    def _finished(self, output: OutputT) -> common_pb2.Trajectory | None:
        """The trajectory of an output that finished."""

    @property
    def lease_epoch(self) -> int:
        """The lease that the stream serves under."""
        return self._header.lease_epoch

    def _holds(self) -> bool:
        return self._serving.fence.holds(self._header.lease_epoch)

    def end(self) -> None:
        """Ends the stream with ABORTED RUN_CLOSED after what has come back."""
        self._inbox.put_nowait(
            ServiceError(
                grpc.StatusCode.ABORTED,
                "RUN_CLOSED",
                f"{self._run.name} was closed; its partial outputs are out",
            )
        )

    async def revoke(self) -> None:
        """Stops the samples; the last message has their partial outputs and says that the lease was revoked."""
        self._revoking = True
        await self._abort()
        self._inbox.put_nowait(Revoked())

    async def responses(self, requests: AsyncIterator[Request]) -> AsyncGenerator[ResponseT, None]:
        """Responses until everything that was assigned has ended; aborts what still runs when left early."""
        reader = asyncio.create_task(self._read(requests), name="read assignments")
        self._run.streams.add(self)
        try:
            while not self._revoked and (self._reading or self._outstanding or self._revoking):
                response = self._respond(await self._prepared(await self._next_outputs()))
                if response is not None:
                    yield response
                    self._serving.after_response()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await self._leave()
            self._keep_unsent()
            self._run.streams.discard(self)
            self.ended.set()

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        try:
            async for request in requests:
                await self._obey(request)
        except ServiceError as error:
            self._inbox.put_nowait(error)
        except Exception as error:  # noqa: BLE001  # without its reader, a stream would stay open for ever
            message = f"reading assignments failed: {type(error).__name__}: {error}"
            self._inbox.put_nowait(ServiceError(grpc.StatusCode.INTERNAL, "BUG", message))
        else:
            self._inbox.put_nowait(None)

    async def _obey(self, request: Request) -> None:
        kind = request.WhichOneof("message")  # type: ignore[attr-defined]
        if kind == "assign":
            self._check_retention()
            await self._submit(request.assign)
        elif kind == "reauthorize":
            self._serving.fence.check(request.reauthorize.header, lease=True)
            self._header = request.reauthorize.header
        else:
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID", "the opening comes first and once"
            )

    def _check_retention(self) -> None:
        retention = self._run.retention
        if retention.full and not self._evaluation:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "RETENTION_FULL",
                f"{len(retention)} trajectories, {retention.size_bytes} bytes, are kept; {retention.budget_bytes} "
                "are allowed: call ReleaseTrajectories for what is trained or dropped",
            )

    async def _next_outputs(self) -> list[OutputT]:
        """At least one item of the inbox, and what else is there up to a response's size."""
        outputs = self._taken(await self._inbox.get())
        size = sum(map(self._size, outputs))
        while not (self._inbox.empty() or self._revoked) and size < RESPONSE_BYTES:
            if isinstance(item := self._inbox.get_nowait(), ServiceError):
                self._inbox.put_nowait(item)  # After the outputs that came before it have been sent.
                break
            more = self._taken(item)
            size += sum(map(self._size, more))
            outputs += more
        return outputs

    def _taken(self, item: Sequence[OutputT] | ServiceError | Revoked | None) -> list[OutputT]:
        if isinstance(item, ServiceError):
            raise item
        if isinstance(item, Revoked):
            self._revoked = True
            return []
        if item is None:
            self._reading = False
            return []
        return list(item)

    def _retain(self, trajectory: common_pb2.Trajectory) -> None:
        if not self._evaluation:
            self._run.retention.add(trajectory)

    def _keep_unsent(self) -> None:
        # What finished while the caller went away is still the producer's to keep.
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            for output in item if isinstance(item, Sequence) else []:
                if (trajectory := self._finished(output)) is not None:
                    self._retain(trajectory)


AnyStream = SampleStream[Any, Any]
