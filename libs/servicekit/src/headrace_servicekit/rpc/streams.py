"""Runs what a stream of requests asks for side by side and gives results as they come. Knows no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")
Expand = Callable[[Request], Iterable[Awaitable[Result]]]


class _Unordered(Generic[Request, Result]):
    def __init__(self, expand: Expand[Request, Result], limit: int, linger_s: float) -> None:
        self._expand = expand
        self._limit = limit
        self._linger_s = linger_s
        self._held = 0
        self._freed = asyncio.Event()
        self._running: set[asyncio.Future[Result]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        # None marks the end; an exception ends the stream.
        self._ready: asyncio.Queue[Result | BaseException | None] = asyncio.Queue()

    async def pump(self, requests: AsyncIterator[Request]) -> None:
        try:
            async for request in requests:
                work = iter(self._expand(request))
                while await self._room() and (piece := next(work, None)) is not None:
                    self._held += 1
                    self._start(piece)
            await self._idle.wait()
            self._ready.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again where the results are read
            self._ready.put_nowait(error)
            if isinstance(requests, AsyncGenerator):
                await requests.aclose()

    async def _room(self) -> bool:
        while self._held >= self._limit:
            self._freed.clear()
            await self._freed.wait()
        return True

    def _start(self, piece: Awaitable[Result]) -> None:
        future = asyncio.ensure_future(piece)
        self._running.add(future)
        self._idle.clear()
        future.add_done_callback(self._ended)

    def _ended(self, future: asyncio.Future[Result]) -> None:
        self._running.discard(future)
        if not future.cancelled():
            self._ready.put_nowait(future.exception() or future.result())
        if not self._running:
            self._idle.set()

    async def batch(self) -> tuple[list[Result], bool]:
        """What is ready, at least one thing; and whether more may come."""
        results: list[Result] = []
        next_one = await self._ready.get()
        if self._linger_s and self._running:
            await self._linger()
        while next_one is not None:
            if isinstance(next_one, BaseException):
                raise next_one
            results.append(next_one)
            if self._ready.empty():
                return results, True
            next_one = self._ready.get_nowait()
        return results, False

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(self._linger_s):
                await self._idle.wait()
        except TimeoutError:
            pass

    def free(self, count: int) -> None:
        self._held -= count
        self._freed.set()

    def cancel(self) -> None:
        for future in list(self._running):
            future.cancel()


async def until(ended: asyncio.Event, requests: AsyncIterator[Request]) -> AsyncIterator[Request]:
    """Yields requests until there are no more or `ended` is set."""
    ending = asyncio.ensure_future(ended.wait())
    following: asyncio.Task[Request] | None = None
    try:
        while True:
            following = asyncio.create_task(_next(requests))
            await asyncio.wait({following, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            try:
                yield following.result()
            except EOFError:
                return
    finally:
        ending.cancel()
        if following is not None:
            following.cancel()


async def _next(requests: AsyncIterator[Request]) -> Request:
    """The next request; raises EOFError at the end, as a task cannot raise StopAsyncIteration."""
    async for request in requests:
        return request
    raise EOFError


async def unordered(
    requests: AsyncIterator[Request], expand: Expand[Request, Result], limit: int, linger_s: float = 0.0
) -> AsyncIterator[list[Result]]:
    """Yields the results of all that `expand` makes of the requests, in any order, as many as are ready.

    At most `limit` run or wait to be taken, so that a slow reader slows its writer. Once one is ready, others
    that still run get up to `linger_s` seconds to come with it: results that take microseconds are not worth
    a message each. An exception of `requests`, of `expand` or of a piece of work ends the stream; what still
    runs is cancelled. `expand` may give futures, which cost no task.
    """
    state = _Unordered(expand, limit, linger_s)
    pump = asyncio.create_task(state.pump(requests))
    try:
        more = True
        while more:
            results, more = await state.batch()
            if results:
                yield results
                state.free(len(results))
    finally:
        pump.cancel()
        state.cancel()
