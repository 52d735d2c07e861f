"""What users' specs ask for, beside the event loop: in a few threads of its own, with a deadline.

A thread cannot be ended. One that is stuck takes a place of its kind of work, and nothing else of the coordinator waits
for these threads. Knows no spec.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class TooSlow(Exception):
    """Work that has not ended by its deadline; says which, and for how long it was waited."""


class Aside:
    """Threads for one kind of work: at most `threads` at once, each awaited for at most `seconds`."""

    def __init__(self, what: str, threads: int, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=what)

    async def run(self, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises. Raises TooSlow at the deadline, which the wait for a thread is part of."""
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except TimeoutError as error:
            raise TooSlow(f"{self._what} has taken more than {self._seconds:g} s") from error


PARSING = Aside("reading the request", 2, 20.0)
CHECKING = Aside("checking the spec", 2, 30.0)
READING = Aside("reading the data", 4, 600.0)
