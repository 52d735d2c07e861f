"""Runs what a stream of requests asks for side by side and gives results as they come. Knows no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class _Unordered(Generic[Request, Result]):
    def __init__(
        self, expand: Callable[[Request], Iterable[Coroutine[None, None, Result]]], limit: int
    ) -> None:
        self._expand = expand
        self._limit = limit
        self._held = 0
        self._freed = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        # None marks the end; an exception ends the stream.
        self._ready: asyncio.Queue[Result | Exception | None] = asyncio.Queue()

    async def pump(self, requests: AsyncIterator[Request]) -> None:
        try:
            async for request in requests:
                for work in self._expand(request):
                    while self._held >= self._limit:
                        self._freed.clear()
                        await self._freed.wait()
                    self._held += 1
                    task = asyncio.create_task(self._run(work))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
            await asyncio.gather(*self._running)
            self._ready.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again where the results are read
            self._ready.put_nowait(error)

    async def _run(self, work: Coroutine[None, None, Result]) -> None:
        try:
            self._ready.put_nowait(await work)
        except Exception as error:  # noqa: BLE001 - raised again where the results are read
            self._ready.put_nowait(error)

    async def batch(self) -> tuple[list[Result], bool]:
        """What is ready, at least one thing; and whether more may come."""
        results: list[Result] = []
        next_one = await self._ready.get()
        while next_one is not None:
            if isinstance(next_one, Exception):
                raise next_one
            results.append(next_one)
            if self._ready.empty():
                return results, True
            next_one = self._ready.get_nowait()
        return results, False

    def free(self, count: int) -> None:
        self._held -= count
        self._freed.set()

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()


async def unordered(
    requests: AsyncIterator[Request],
    expand: Callable[[Request], Iterable[Coroutine[None, None, Result]]],
    limit: int,
) -> AsyncIterator[list[Result]]:
    """Yields the results of all that `expand` makes of the requests, in any order, as many as are ready.

    At most `limit` run or wait to be taken, so that a slow reader slows its writer. An exception of
    `requests`, of `expand` or of a piece of work ends the stream; what still runs is cancelled.
    """
    state = _Unordered(expand, limit)
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
