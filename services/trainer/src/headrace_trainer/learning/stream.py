"""One Learn stream: requests are read ahead of their acknowledgements, which go out in their order.

It ends in order when its run is closed, or when its lease is revoked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack

import grpc
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.lease.open_runs import OpenRuns
from headrace_servicekit.rpc.errors import ServiceError

from headrace_trainer.group.compute import refusals
from headrace_trainer.learning.queue import LearnQueue
from headrace_trainer.learning.samples import GroupRecord
from headrace_trainer.session.session import LearnItem

AHEAD = 8
"""Requests that are read and not acknowledged."""
Admit = Callable[[common_pb2.CommandHeader, trainer_pb2.LearnRequest], LearnItem]
"""Checks the stream's authority and reads a request; raises ServiceError."""


class LearnStream:
    """The life of a stream. `revoked` says that it has ended because its lease was revoked."""

    def __init__(self, queue: LearnQueue, admit: Admit, open_runs: OpenRuns) -> None:
        self._queue = queue
        self._admit = admit
        self._open_runs = open_runs
        self.lease_epoch = 0
        self.revoked = False
        self._closed = False
        self._reader: asyncio.Task[None] | None = None
        self._ahead: asyncio.Queue[tuple[float, asyncio.Future[list[GroupRecord]]] | None] = asyncio.Queue(
            AHEAD
        )

    async def outcomes(
        self, requests: AsyncIterator[trainer_pb2.LearnRequest]
    ) -> AsyncGenerator[tuple[float, list[GroupRecord]], None]:
        """(seconds since it was read, its groups' records) of each request, until one that the revoke came before."""
        reader = self._reader = asyncio.create_task(self._read(requests), name="learn stream")
        try:
            while (entry := await self._ahead.get()) is not None:
                read_at, future = entry
                await asyncio.wait([future])
                if self.revoked and future.exception() is not None:
                    return
                with refusals():
                    records = future.result()
                yield time.monotonic() - read_at, records
            if self.revoked:
                return
            if self._closed:
                raise ServiceError(
                    grpc.StatusCode.ABORTED,
                    "RUN_CLOSED",
                    "the run was closed; what was learned of it is told",
                )
            await reader
        finally:
            reader.cancel()

    def revoke(self) -> None:
        """The lease ends: nothing more is read, and what was read is told, as far as it was learned."""
        self.revoked = True
        if self._reader is not None:
            self._reader.cancel()

    async def _read(self, requests: AsyncIterator[trainer_pb2.LearnRequest]) -> None:
        header: common_pb2.CommandHeader | None = None
        try:
            with self._queue.sender(), ExitStack() as stack:
                async for request in requests:
                    if header is None and request.HasField("header"):
                        stack.enter_context(self._open_runs.until_closed(request.header.run, self._close))
                    header = request.header if request.HasField("header") else header
                    if header is None:
                        raise ServiceError(
                            grpc.StatusCode.INVALID_ARGUMENT,
                            "INVALID",
                            "the first message of a Learn stream needs a header",
                        )
                    self.lease_epoch = header.lease_epoch
                    future = await self._queue.put(self._admit(header, request))
                    self._open_runs.applied(header)
                    await self._ahead.put((time.monotonic(), future))
        finally:
            await self._ahead.put(None)

    def _close(self) -> None:
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
