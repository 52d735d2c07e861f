"""The calls and samples of sessions between those who ask and the run that executes them. Knows no instance."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path

from headrace_schema.sessions import Operation, Result, Sample

from headrace_coordinator.sessions.journal import Journal

MOST_WAITING = 10_000
"""Samples that one session may have in work."""
MOST_KEPT = 20_000
"""Results of samples that are kept of one session."""


class AskedSample:
    """A request for samples, with the weights that it is bound to."""

    def __init__(self, key: str, request: Sample) -> None:
        self.key, self.request = key, request
        self.result: Result | None = None


class Desk:
    """Of one session, as long as this coordinator lives. `wake` is called when there is news."""

    def __init__(self, directory: Path, wake: Callable[[], None]) -> None:
        self.journal = Journal(directory)
        self.wake = wake
        self.published = 0
        """The version that `latest` means; 0: none was published since the run began to work here."""
        self.waiting: deque[AskedSample] = deque()
        self.at_work = 0
        """Samples that are being made."""
        self._samples: dict[str, AskedSample] = {}
        self._writing = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a sample waits or is being made."""
        return bool(self.waiting or self.at_work)

    @property
    def next_seq(self) -> int:
        """The lowest number that no call has used."""
        return self.journal.end + 1

    async def keep(self, seq: int, operation: Operation) -> None:
        """Keeps a call durably, unless its number is used."""
        async with self._writing:
            if seq not in self.journal.kinds:
                await asyncio.to_thread(self.journal.keep, seq, operation)
        self.wake()

    async def settle(self, seq: int, result: Result) -> None:
        """A call was executed."""
        async with self._writing:
            await asyncio.to_thread(self.journal.settle, seq, result)
        self.wake()

    def ask(self, key: str, request: Sample) -> str:
        """Keeps a request for samples, unless its key is used; returns the key."""
        key = key or uuid.uuid4().hex
        if key not in self._samples:
            bound = request
            if request.weights == "latest" and self.published:
                bound = request.model_copy(update={"weights": str(self.published)})
            asked = AskedSample(key, bound)
            self._samples[key] = asked
            self.waiting.append(asked)
            self._forget()
        self.wake()
        return key

    def sample(self, key: str) -> AskedSample | None:
        """A request for samples by its key."""
        return self._samples.get(key)

    def _forget(self) -> None:
        for key in list(self._samples):
            if len(self._samples) <= MOST_KEPT:
                return
            if self._samples[key].result is not None:
                del self._samples[key]


class Desks:
    """Those of all sessions, by run."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._desks: dict[str, Desk] = {}

    def of(self, run: str, directory: str) -> Desk:
        """The desk of a run."""
        if run not in self._desks:
            self._desks[run] = Desk(Path(directory), self._wake)
        return self._desks[run]
