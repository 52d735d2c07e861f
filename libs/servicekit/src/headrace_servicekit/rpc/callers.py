"""Work for an HTTP caller, cancelled when the caller leaves. Knows only ASGI's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
LEFT_STATUS = 499
"""Status in logs of a request whose caller has left."""


class CallerLeft(Exception):
    """The caller's connection was closed before its answer was there."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled where the caller leaves first. Raises CallerLeft then.

    `receive` is the request's, whose body was read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerLeft
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
