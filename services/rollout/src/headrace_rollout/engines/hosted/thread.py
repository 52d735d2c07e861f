"""One thread with an event loop: a hosted engine's calls do not hold up the service's own. Knows no engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace_rollout.engines.base import Refused

_Result = TypeVar("_Result")


class LoopThread:
    """Runs coroutines on a loop of its own until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self.closed = False

    async def call(self, act: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """The result of `act` on the loop. It goes on when the caller is cancelled: a command is whole or not begun."""
        if self.closed:
            raise Refused("NOT_OPEN", "the run was closed; call OpenRun first")
        future = asyncio.run_coroutine_threadsafe(act(), self._loop)
        return await asyncio.shield(asyncio.wrap_future(future))

    async def close(self) -> None:
        """Ends the loop and its tasks, then the thread."""
        if self.closed:
            return
        self.closed = True
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
