"""What users' specs ask for, beside the event loop: in a few threads for each kind of work, with a deadline.

At the deadline the place is free again, whatever the thread does: Python code is ended there, and a thread that stands
in the kernel costs nothing but itself. Knows no spec.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import suppress
from typing import Any, Generic, TypeVar

from typing_extensions import override

Result = TypeVar("Result")


class TooSlow(Exception):
    """Work that has not ended by its deadline; says which, and for how long it was waited."""


class _Ended(BaseException):
    """Raised in the thread of work for which nobody waits any more; no `except Exception` keeps it."""


class _Work(Executor, Generic[Result]):
    """Work in a thread of its own, which keeps no process from its end."""

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        loop = asyncio.get_running_loop()
        self.began, self._name = loop.time(), name
        self._thread: threading.Thread | None = None
        self._ending, self._inside, self._over = threading.Lock(), False, False
        self.done: asyncio.Future[Result] = loop.create_future()
        self._given = loop.run_in_executor(self, work)
        self._given.add_done_callback(self._tell)

    @override
    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        found: Future[Any] = Future()

        def run() -> None:
            with suppress(_Ended, InvalidStateError):
                with self._ending:
                    if self._over:
                        return
                    self._inside = True
                try:
                    result = work(*args, **named)
                except Exception as error:  # noqa: BLE001 - raised again where the work is awaited
                    found.set_exception(error)
                else:
                    found.set_result(result)
                finally:
                    with self._ending:
                        self._over = True
                    time.sleep(0)  # what was raised while it waited for `_ending` comes here, and not behind

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        return found

    def _tell(self, given: asyncio.Future[Result]) -> None:
        error = None if given.cancelled() else given.exception()
        if self.done.done() or given.cancelled():
            return
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(given.result())

    def end(self) -> None:
        """Ends its Python code at the next step, where it still runs."""
        self._given.cancel()
        with self._ending:
            if self._thread is not None and self._inside and not self._over:
                of_thread = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(of_thread, ctypes.py_object(_Ended))
            self._over = True  # once: a second one would meet the thread's own end


class Aside:
    """Threads for one kind of work: at most `threads` at once, each awaited for at most `seconds`.

    While others wait, work that has run for `turn_s` gives its place to the newest of them: many that are stuck delay
    one that is not by a turn.
    """

    def __init__(self, what: str, threads: int, seconds: float, turn_s: float | None = None) -> None:
        self._what, self._seconds = what, seconds
        self._turn_s = seconds if turn_s is None else turn_s
        self._free = threads
        self._running: list[_Work[Any]] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises. Raises TooSlow at the deadline, which the wait for a thread is part of."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._take_place()
                try:
                    return await self._run(work)
                finally:
                    self._leave_place()
        except TimeoutError as error:
            raise TooSlow(f"{self._what} has taken more than {self._seconds:g} s") from error

    async def _run(self, work: Callable[[], Result]) -> Result:
        mine = _Work(work, self._what)
        self._running.append(mine)
        self._end_turns()
        try:
            return await mine.done
        except BaseException:
            mine.end()
            raise
        finally:
            self._running.remove(mine)

    async def _take_place(self) -> None:
        if self._free:
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._end_turns()
        try:
            await place
        except BaseException:
            if place in self._waiting:
                self._waiting.remove(place)
            else:
                self._leave_place()
            raise

    def _leave_place(self) -> None:
        if self._waiting:
            self._waiting.pop().set_result(None)
        else:
            self._free += 1

    def _end_turns(self) -> None:
        """Ends work that has had its turn, for as many as wait, and looks again at the end of the next turn."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        for work in [each for each in self._running if not each.done.done()][: len(self._waiting)]:
            if (left_s := work.began + self._turn_s - loop.time()) > 0:
                self._timer = loop.call_later(left_s, self._end_turns)
                return
            reason = f"{self._what} has taken more than {self._turn_s:g} s, and others wait"
            work.done.set_exception(TooSlow(reason))


PARSING = Aside("reading the request", 2, 20.0, turn_s=5.0)
CHECKING = Aside("checking the spec", 2, 30.0, turn_s=10.0)
READING = Aside("reading the data", 4, 600.0, turn_s=30.0)
OPENING = Aside("reading the data of a run", 4, 600.0)
"""Of runs that are admitted already: no spec that is being checked takes their places."""
