"""Named waits and long stages: a stuck system can say what it waits for, a slow one what it works on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace_schema.progress import Progress


class WaitTimeout(Exception):
    """A wait passed its deadline; the message names what was waited for and who holds it."""


LONG_S = 2.0
"""A stage that takes longer is told."""


class Waits:
    """What each run waits for now, and which stages it is in.

    `ended` is told of each stage that took longer than LONG_S and has come to its end: the run, the stage, its seconds.
    """

    def __init__(
        self, now: Callable[[], float], ended: Callable[[str, str, float], None] = lambda *_: None
    ) -> None:
        self._now, self._ended = now, ended
        self._by_run: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
        self._stages: dict[str, list[tuple[str, float, Callable[[], Progress | None]]]] = defaultdict(list)
        self.progress: dict[str, Progress | None] = {}
        """How far instances are, as their newest heartbeats say."""

    @contextmanager
    def stage(
        self,
        run: str,
        what: str,
        *,
        told: bool = True,
        progress: Callable[[], Progress | None] = lambda: None,
    ) -> Iterator[None]:
        """Shows `what` is done while the body runs, from LONG_S on; with `told` its end is an event."""
        entry = (what, self._now(), progress)
        self._stages[run].append(entry)
        try:
            yield
            seconds = self._now() - entry[1]
            if told and seconds >= LONG_S:
                self._ended(run, what, seconds)
        finally:
            self._stages[run].remove(entry)
            if not self._stages[run]:
                del self._stages[run]

    def stages(self, run: str) -> list[str]:
        """The long stages that a run is in."""
        now = self._now()
        return [
            f"{what}, for {_rounded(now - since)} s" + (f": {far.words(now - since)}" if far else "")
            for what, since, progress in self._stages.get(run, ())
            if now - since >= LONG_S
            for far in [progress()]
        ]

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
    unit = 2 if seconds < 10 else 10 if seconds < 60 else 60
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
