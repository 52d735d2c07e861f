"""A bounded queue before the one thread that learns: what has queued up is learned together.

Knows no gRPC and no tensors.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from headrace_trainer.errors import Refusal
from headrace_trainer.learning.samples import GroupRecord
from headrace_trainer.session.session import LearnItem

Learn = Callable[[list[LearnItem]], Awaitable[list[list[GroupRecord] | Refusal]]]
LINGER_S = 0.005
"""A batch with room begins when its first item has waited so long, while somebody may still send another: groups
settle in bursts, and of a small model half a micro-batch costs nearly as much as a whole one."""
BATCHES, LEAST_QUEUED = 8, 1 << 16
"""A queue is full with so many batches, of no fewer tokens in all."""
SHORT_S = 0.05
"""Batches that take longer are worth no such wait: their time is their tokens'."""
Waiting = tuple[LearnItem, int, "asyncio.Future[list[GroupRecord]]"]


class LearnQueue:
    """Items of all streams, in order. `put` waits while BATCHES are queued: that slows the sender.

    A batch takes whole items up to `batch_tokens()`, so that a long queue is still acknowledged piece by piece.
    """

    def __init__(self, learn: Learn, batch_tokens: Callable[[], int]) -> None:
        self._learn = learn
        self._batch_tokens = batch_tokens
        self._waiting: deque[Waiting] = deque()
        self._queued = 0
        self._room = asyncio.Condition()
        self._worker: asyncio.Task[None] | None = None
        self._first_at = self._last_s = 0.0
        self._senders = 0
        self._arrived = asyncio.Event()

    @contextmanager
    def sender(self) -> Iterator[None]:
        """While the body runs, more items may come."""
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
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work(), name="learn")
        return future

    def _limit(self) -> int:
        return max(BATCHES * self._batch_tokens(), LEAST_QUEUED)

    async def _work(self) -> None:
        while self._waiting:
            await self._linger()
            batch = self._take()
            began = asyncio.get_running_loop().time()
            try:
                results = await self._learn([item for item, _, _ in batch])
            except Exception as error:  # noqa: BLE001 - whoever waits for this batch must hear of it
                results = [error] * len(batch)  # type: ignore[list-item]
            self._last_s = asyncio.get_running_loop().time() - began
            for (_, _, future), result in zip(batch, results, strict=True):
                if future.done():
                    continue  # its stream is gone; the groups are in all the same
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
                while self._senders and sum(size for _, size, _ in self._waiting) < self._batch_tokens():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return

    def _take(self) -> list[Waiting]:
        batch, most = [self._waiting.popleft()], self._batch_tokens()
        total = batch[0][1]
        while self._waiting and total + self._waiting[0][1] <= most:
            batch.append(self._waiting.popleft())
            total += batch[-1][1]
        return batch
