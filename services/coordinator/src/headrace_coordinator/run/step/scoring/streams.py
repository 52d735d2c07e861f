"""Score streams of one run, kept open from one step to the next as long as they are used.

Opening a stream costs as much as asking it: a run of short steps asks over the same one. Knows nothing of results.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.reward.v1 import reward_pb2 as reward

from headrace_coordinator.run.workers.clients import RewardClient
from headrace_coordinator.waits import Notifier

Question = tuple[int, int, str]
"""Prompt ordinal, sample index and reward stage."""
IDLE_S = 1.0
"""A stream without questions ends after so long: an open one would look like a call that hangs."""


@dataclass(eq=False)
class Lane:
    """The stream to one instance, and what it was asked."""

    member: RewardClient
    opened_at: float
    heard_at: float
    task: asyncio.Task[None] = field(init=False)
    asked: dict[Question, reward.ScoreItem] = field(default_factory=dict)
    over: bool = False
    """It takes no more questions."""


class Asker(Protocol):
    """Who has questions now."""

    def share(self, lane: Lane) -> list[reward.ScoreItem]:
        """Questions for a lane; they are noted in its `asked`."""

    def take(self, lane: Lane, results: Iterable[reward.ScoreResult]) -> None:
        """A lane's results."""


class Lanes:
    """A run's open Score streams, for one asker at a time."""

    def __init__(self) -> None:
        self.all: list[Lane] = []
        self.news = Notifier()
        self._asker: Asker | None = None

    @property
    def live(self) -> list[Lane]:
        """Lanes that take questions."""
        return [lane for lane in self.all if not lane.over]

    def begin(self, asker: Asker, members: Sequence[RewardClient], lifetime_s: float) -> None:
        """From now on `asker` asks; streams that are older, or to none of `members`, end in order."""
        assert self._asker is None, "two askers at once"
        self._asker = asker
        for lane in self.live:
            known = any(lane.member is member for member in members)
            lane.over = not known or now() - lane.opened_at > lifetime_s
        self.news.beat()

    def rest(self) -> None:
        """Nobody asks for now."""
        self._asker = None

    def open(self, member: RewardClient, lifetime_s: float) -> None:
        """Opens a stream, which is asked for `lifetime_s` and has as long again to answer."""
        lane = Lane(member, now(), now())
        lane.task = asyncio.ensure_future(self._converse(lane, 2 * lifetime_s))
        self.all.append(lane)

    async def end(self) -> None:
        """Ends all streams at once."""
        self._asker = None
        lanes, self.all = self.all, []
        for lane in lanes:
            lane.over = True
            lane.task.cancel()
        await asyncio.gather(*(lane.task for lane in lanes), return_exceptions=True)

    async def _converse(self, lane: Lane, limit_s: float) -> None:
        try:
            async for response in lane.member.score(self._questions(lane), limit_s):
                lane.heard_at = now()
                if self._asker is not None:
                    self._asker.take(lane, response.results)
        finally:
            lane.over = True

    async def _questions(self, lane: Lane) -> AsyncIterator[Sequence[reward.ScoreItem]]:
        # gRPC still reads this when the stream is broken: a lane that is over takes nothing more.
        while not lane.over:
            news = self.news.next()
            if items := self._asker.share(lane) if self._asker is not None else []:
                yield items
            elif not (await asyncio.wait({news}, timeout=IDLE_S))[0] and not lane.asked:
                lane.over = True


def now() -> float:
    """Seconds on the loop's clock."""
    return asyncio.get_running_loop().time()
