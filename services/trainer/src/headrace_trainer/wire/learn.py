"""Learn: streams of settled groups, and the bounded queue before the one thread that learns.

Requests of a stream are read ahead of their acknowledgements, which go out in their order; what has queued up, of all
streams, is learned together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager

import grpc
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.lease.open_runs import OpenRuns
from headrace_servicekit.memory.blobs import BlobReader
from headrace_servicekit.rpc.episodes import Bodies, bodies_of
from headrace_servicekit.rpc.errors import ServiceError

from headrace_trainer.errors import Refusal
from headrace_trainer.learning.samples import GroupRecord, LearnItem
from headrace_trainer.wire.calls import refusals

Learn = Callable[[list[LearnItem]], Awaitable[list[list[GroupRecord] | Refusal]]]
LINGER_S = 0.005
"""A batch with room begins when its first item has waited so long, while a stream may still send another: groups settle
in bursts, and half a micro-batch of a small model costs nearly as much as a whole one."""
BATCHES, LEAST_QUEUED = 8, 1 << 16
"""A queue is full with so many batches, of no fewer tokens in all."""
SHORT_S = 0.05
"""After a batch that took longer the next one does not wait: its time depends on its tokens alone."""
FETCHED_TOGETHER = 8
"""Bodies that are asked for at once."""
Waiting = tuple[LearnItem, int, "asyncio.Future[list[GroupRecord]]"]


async def fetch_bodies(groups: Iterable[trainer_pb2.SettledGroup], blobs: BlobReader) -> Bodies:
    """What settled groups refer to, a few at a time. Raises ServiceError, such as BLOB_GONE."""
    wanted = [body for group in groups for member in group.members for body in bodies_of(member.trajectory)]
    found: dict[str, bytearray] = {}
    for first in range(0, len(wanted), FETCHED_TOGETHER):
        some = wanted[first : first + FETCHED_TOGETHER]
        bodies = await asyncio.gather(*(blobs.read(each) for each in some))
        found.update((each.digest, body) for each, body in zip(some, bodies, strict=True))
    return found


class LearnQueue:
    """Items of all streams, in order. `put` waits while BATCHES are queued: that slows the sender.

    A batch takes whole items up to `batch_tokens()`, so that a long queue is still acknowledged piece by piece.
    `worker` is the task of `work`, which the first stream starts.
    """

    def __init__(self, learn: Learn, batch_tokens: Callable[[], int]) -> None:
        self._learn = learn
        self._batch_tokens = batch_tokens
        self._waiting: deque[Waiting] = deque()
        self._queued = 0
        self._room = asyncio.Condition()
        self.worker: asyncio.Task[None] | None = None
        self._closed = False
        self._first_at = self._last_s = 0.0
        self._senders = 0
        self._arrived = asyncio.Event()

    @contextmanager
    def sender(self) -> Iterator[None]:
        """Within its block more items may come."""
        self._senders += 1
        try:
            yield
        finally:
            self._senders -= 1
            self._arrived.set()

    async def put(self, item: LearnItem) -> asyncio.Future[list[GroupRecord]]:
        """Queues an item; the future tells what became of its groups, or raises Refusal."""
        size = max(1, sum(group.token_count() for group in item.groups))
        async with self._room:
            await self._room.wait_for(lambda: not self._queued or self._queued + size <= self._limit())
            self._queued += size
        future: asyncio.Future[list[GroupRecord]] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._first_at = asyncio.get_running_loop().time()
        self._waiting.append((item, size, future))
        self._arrived.set()
        return future

    def close(self) -> None:
        """The run is closed: what is not being learned is refused."""
        self._closed = True
        self._arrived.set()

    def _limit(self) -> int:
        return max(BATCHES * self._batch_tokens(), LEAST_QUEUED)

    async def work(self) -> None:
        """Learns what is queued, batch by batch, until the queue is closed."""
        while not self._closed or self._waiting:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            await self._linger()
            batch = self._take()
            began = asyncio.get_running_loop().time()
            results: Many[list[GroupRecord] | Exception]
            try:
                if self._closed:
                    raise Refusal("NOT_OPEN", "the run was closed before these groups were learned")
                results = await self._learn([item for item, _, _ in batch])
            except Exception as error:  # noqa: BLE001 - the streams that wait for this batch get it
                results = [error] * len(batch)
            self._last_s = asyncio.get_running_loop().time() - began
            for (_, _, future), result in zip(batch, results, strict=True):
                if future.done():
                    continue  # its stream has ended; the groups are accumulated
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
            async with self._room:
                self._queued -= sum(size for _, size, _ in batch)
                self._room.notify_all()

    async def _linger(self) -> None:
        if self._last_s > SHORT_S:
            return
        try:
            async with asyncio.timeout_at(self._first_at + LINGER_S):
                while (
                    self._senders
                    and not self._closed
                    and sum(size for _, size, _ in self._waiting) < self._batch_tokens()
                ):
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return

    def _has_room(self) -> bool:
        return sum(size for _, size, _ in self._waiting) < self._batch_tokens()

    def _take(self) -> list[Waiting]:
        batch, most = [self._waiting.popleft()], self._batch_tokens()
        total = batch[0][1]
        while self._waiting and total + self._waiting[0][1] <= most:
            batch.append(self._waiting.popleft())
            total += batch[-1][1]
        return batch


AHEAD = 8
"""Requests that are read and not acknowledged."""
Admit = Callable[[common_pb2.CommandHeader, trainer_pb2.LearnRequest], Awaitable[LearnItem]]
"""Checks the stream's authority and reads a request, with the bodies that it refers to; raises ServiceError."""


class LearnStream:
    """One stream: its reader, and the outcomes of what was read. `revoked`: it ended as its lease was revoked."""

    def __init__(self, queue: LearnQueue, admit: Admit, open_runs: OpenRuns) -> None:
        self._queue = queue
        self._admit = admit
        self._open_runs = open_runs
        self.lease_epoch = 0
        self.revoked = False
        self._closed = False
        self.reader: asyncio.Task[None] | None = None
        """The task of `read`."""
        self._ahead: asyncio.Queue[tuple[float, asyncio.Future[list[GroupRecord]]] | None] = asyncio.Queue(
            AHEAD
        )

    async def outcomes(self) -> AsyncGenerator[tuple[float, list[GroupRecord]], None]:
        """(seconds since it was read, its groups' records) of each request, until one that the revoke came before."""
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
                grpc.StatusCode.ABORTED, "RUN_CLOSED", "the run was closed; what was learned of it is told"
            )
        assert self.reader is not None
        await self.reader

    def revoke(self) -> None:
        """The lease ends: nothing more is read; outcomes of what was learned are still sent."""
        self.revoked = True
        if self.reader is not None:
            self.reader.cancel()

    async def read(self, requests: AsyncIterator[trainer_pb2.LearnRequest]) -> None:
        """Queues what comes, ahead of the outcomes."""
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
                    future = await self._queue.put(await self._admit(header, request))
                    self._open_runs.applied(header)
                    await self._ahead.put((time.monotonic(), future))
        finally:
            await self._ahead.put(None)

    def _close(self) -> None:
        self._closed = True
        if self.reader is not None:
            self.reader.cancel()
