"""Score streams of one run, kept open from one step to the next as long as they are used.

Opening a stream takes as long as asking over it: a run of short steps uses the same one again. Knows nothing of
results.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from headrace.reward.v1 import reward_pb2 as reward

from headrace_coordinator.fleet.deaths import Use
from headrace_coordinator.run.workers.clients import RewardClient
from headrace_coordinator.waits import Notifier

Question = tuple[int, int, str]
"""Prompt ordinal, sample index and reward stage."""
IDLE_S = 1.0
"""A stream without questions ends after so long: an open one would look like a call that hangs."""


@dataclass(eq=False)
class ScoreStream:
    """The stream to one instance, and what it was asked."""

    worker: RewardClient
    opened_at: float
    heard_at: float
    task: asyncio.Task[None] = field(init=False)
    asked: dict[Question, reward.ScoreItem] = field(default_factory=dict)
    use: Use | None = None
    """While it is asked something: the run's scorers are at work there."""
    over: bool = False
    """It takes no more questions."""
    shown: ExitStack = field(default_factory=ExitStack)
    """Shows that the run waits for its answers."""


class Asker(Protocol):
    """Who has questions now."""

    def share(self, stream: ScoreStream) -> list[reward.ScoreItem]:
        """Questions for a stream, which are noted in its `asked`."""

    def take(self, stream: ScoreStream, results: Iterable[reward.ScoreResult]) -> None:
        """Takes a stream's results."""


class ScoreStreams:
    """A run's open Score streams, for one asker at a time."""

    def __init__(self) -> None:
        self.all: list[ScoreStream] = []
        self.news = Notifier()
        self._asker: Asker | None = None

    @property
    def live(self) -> list[ScoreStream]:
        """Streams that take questions."""
        return [stream for stream in self.all if not stream.over]

    def begin(self, asker: Asker, workers: Sequence[RewardClient], lifetime_s: float) -> None:
        """From now on `asker` asks; streams that are older, or to none of `workers`, end in order."""
        assert self._asker is None, "two askers at once"
        self._asker = asker
        for stream in self.live:
            known = any(stream.worker is worker for worker in workers)
            stream.over = not known or now() - stream.opened_at > lifetime_s
        self.news.beat()

    def retire(self, lifetime_s: float) -> None:
        """Streams that are older take no more questions: one that is asked all the time has a deadline too."""
        for stream in self.live:
            stream.over = now() - stream.opened_at > lifetime_s

    def rest(self) -> None:
        """Nobody asks for now."""
        self._asker = None

    def open(self, worker: RewardClient, lifetime_s: float) -> None:
        """Opens a stream, which is asked for `lifetime_s` and has as long again to answer."""
        stream = ScoreStream(worker, now(), now())
        stream.task = asyncio.ensure_future(self._exchange(stream, 2 * lifetime_s))
        self.all.append(stream)

    async def end(self) -> None:
        """Ends all streams at once."""
        self._asker = None
        streams, self.all = self.all, []
        for stream in streams:
            stream.over = True
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)

    async def _exchange(self, stream: ScoreStream, limit_s: float) -> None:
        try:
            async for response in stream.worker.score(self._questions(stream), limit_s):
                stream.heard_at = now()
                if self._asker is not None:
                    self._asker.take(stream, response.results)
        finally:
            stream.over = True

    async def _questions(self, stream: ScoreStream) -> AsyncIterator[Sequence[reward.ScoreItem]]:
        # gRPC still reads this when the stream is broken: one that is over takes nothing more.
        while not stream.over:
            news = self.news.next()
            if items := self._asker.share(stream) if self._asker is not None else []:
                yield items
            elif not (await asyncio.wait({news}, timeout=IDLE_S))[0] and not stream.asked:
                stream.over = True


def now() -> float:
    """Seconds on the loop's clock."""
    return asyncio.get_running_loop().time()
