"""Named waits: a stuck system can say what it waits for."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class WaitTimeout(Exception):
    """A wait passed its deadline; the message names what was waited for and who holds it."""


class Waits:
    """What each run waits for now."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._by_run: dict[str, list[tuple[str, float, float]]] = defaultdict(list)

    @contextmanager
    def named(self, run: str, what: str, *, after: float = 0.0) -> Iterator[None]:
        """Shows `what` while the body runs; with `after`, after that many seconds, and for how long."""
        entry = (what, self._now(), after)
        self._by_run[run].append(entry)
        try:
            yield
        finally:
            self._by_run[run].remove(entry)
            if not self._by_run[run]:
                del self._by_run[run]

    def of(self, run: str) -> list[str]:
        """What a run waits for."""
        now = self._now()
        return [
            f"{what}, for {_rounded(now - since)} s" if after else what
            for what, since, after in self._by_run.get(run, ())
            if now - since >= after
        ]


def _rounded(seconds: float) -> int:
    """Rounded down, so that a log does not print a new line every second."""
    unit = 10 if seconds < 60 else 60
    return int(seconds // unit) * unit


class Notifier:
    """Wakes all that wait now. Call `next()` before the check that may wait, so that no beat is missed."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        """Done at the next beat."""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def beat(self) -> None:
        """Something has changed."""
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
