"""An asyncio event loop whose clock jumps: no wait takes real time, and a seed decides everything."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
THREAD_S = 0.005
"""Virtual seconds from a thread's work to its result, in which the process that waits can be killed."""


class Stuck(Exception):
    """Every task waits for ever: nothing can happen any more."""


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("every task waits for ever")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose `time()` advances only when every task waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(
        self, executor: Any, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Does the work at once and returns its result a little later: virtual time would not wait for a thread."""
        answered: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - whatever the work raises is its caller's
            self.call_later(THREAD_S, _settle, answered.set_exception, answered, error)
        else:
            self.call_later(THREAD_S, _settle, answered.set_result, answered, result)
        return answered


def _settle(settle: Callable[[Any], None], answered: asyncio.Future[Any], value: object) -> None:
    if not answered.done():
        settle(value)


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` on a new virtual loop and cancels the tasks that it leaves."""
    loop = VirtualLoop()
    errors: list[Mapping[str, Any]] = []
    loop.set_exception_handler(lambda _, context: errors.append(context))
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
