"""Runs what a stream of requests asks for side by side and gives results as they come. Knows no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")
Expand = Callable[[Request], Iterable[Awaitable[Result]]]


@dataclass
class _Asked:
    """One request's work: how much of it still runs."""

    running: int = 0


class _Unordered(Generic[Request, Result]):
    def __init__(self, expand: Expand[Request, Result], limit: int, linger_s: float) -> None:
        self._expand = expand
        self._limit = limit
        self._linger_s = linger_s
        self._held = 0
        self._freed = asyncio.Event()
        self._running: set[asyncio.Future[Result]] = set()
        self._results: list[Result] = []
        self._failure: BaseException | None = None
        self._no_more = False
        self._lingering: asyncio.TimerHandle | None = None
        # Set once there is something to take; each turn of the loop that a result takes is paid by every step.
        self._ready = asyncio.Event()

    async def pump(self, requests: AsyncIterator[Request]) -> None:
        try:
            async for request in requests:
                work, asked = iter(self._expand(request)), _Asked()
                while True:
                    if self._held >= self._limit:
                        await self._room()
                    if (piece := next(work, None)) is None:
                        break
                    self._held += 1
                    self._start(piece, asked)
            self._no_more = True
            self._wake(_Asked())
        except Exception as error:  # noqa: BLE001 - raised again where the results are read
            self._fail(error)
            if isinstance(requests, AsyncGenerator):
                await requests.aclose()

    async def _room(self) -> None:
        while self._held >= self._limit:
            self._freed.clear()
            await self._freed.wait()

    def _start(self, piece: Awaitable[Result], asked: _Asked) -> None:
        future = asyncio.ensure_future(piece)
        self._running.add(future)
        asked.running += 1
        future.add_done_callback(partial(self._ended, asked))

    def _ended(self, asked: _Asked, future: asyncio.Future[Result]) -> None:
        self._running.discard(future)
        asked.running -= 1
        if future.cancelled():
            self._wake(asked)
        elif error := future.exception():
            self._fail(error)
        else:
            self._results.append(future.result())
            self._wake(asked)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._ready.set()

    def _wake(self, asked: _Asked) -> None:
        """Now where nothing of the request runs any more, else in a little while, with what has come by then."""
        if not asked.running or not self._linger_s:
            self._ready.set()
        elif self._lingering is None and self._results:
            self._lingering = asyncio.get_running_loop().call_later(self._linger_s, self._ready.set)

    async def batch(self) -> tuple[list[Result], bool]:
        """What is ready; and whether more may come."""
        await self._ready.wait()
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        self._ready.clear()
        if self._failure is not None:
            raise self._failure
        results, self._results = self._results, []
        return results, bool(self._running) or not self._no_more

    def free(self, count: int) -> None:
        self._held -= count
        self._freed.set()

    def cancel(self) -> None:
        if self._lingering is not None:
            self._lingering.cancel()
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
    """Yields lists of the results that are ready, in any order, of all that `expand` makes of the requests.

    At most `limit` run or wait to be taken, so that a slow reader slows its writer. Once one is ready, others
    of its request get up to `linger_s` seconds to come with it: results that take microseconds are not worth a
    message each. It waits for no other request's: who asked twice uses the first answer meanwhile. An exception
    of `requests`, of `expand` or of a piece of work ends the stream; what still runs is cancelled. `expand` may
    give futures, which cost no task.
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
