"""An engine of several hosts, as the instance that leads it sees the others. Knows no engine.

A follower says what it is, and is told of which start of the engine it is to be a part. gRPC's loop writes here what
followers say, the engine's loop reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.addresses import free_port

MEMBER_S = 30.0
"""How long a start of the engine waits for a follower that is not there: it may be replaced."""
_LOOK_S = 0.02
FILES = "HEADRACE_FOLLOWER_FILES"
"""The variable that tells workers of a follower where its host's versions lie, each below its `version_key`."""


class BackendFailed(Exception):
    """The engine refused a call or broke in it."""


class Hosts:
    """The followers of one engine; `meeting_host` is where their ranks reach the leader."""

    def __init__(self, followers: int, meeting_host: str) -> None:
        self.count = followers + 1
        self._meeting_host = meeting_host
        self._started = 0
        self._asked = rollout_pb2.FollowResponse()
        self._members: dict[int, rollout_pb2.FollowRequest] = {}
        self._names: dict[int, str] = {}
        self._tell: list[Callable[[], None]] = []

    async def serve(
        self, first: rollout_pb2.FollowRequest, requests: AsyncIterator[rollout_pb2.FollowRequest]
    ) -> AsyncGenerator[rollout_pb2.FollowResponse, None]:
        """One follower, until it or its stream ends; yields what it is to do."""
        loop, news, rank = asyncio.get_running_loop(), asyncio.Event(), first.rank

        def tell() -> None:
            loop.call_soon_threadsafe(news.set)

        async def hear() -> None:
            self._members[rank], self._names[rank] = first, first.instance
            async for request in requests:
                self._members[rank] = request
            news.set()

        hearing = asyncio.create_task(hear(), name="hear follower")
        self._tell.append(tell)
        try:
            while not hearing.done():
                yield self._asked
                await news.wait()
                news.clear()
        finally:
            self._tell.remove(tell)
            self._members.pop(rank, None)
            hearing.cancel()

    async def begin(self) -> rollout_pb2.FollowResponse:
        """A new start of the engine, once all followers hold their devices. Raises BackendFailed naming one without."""
        try:
            async with asyncio.timeout(MEMBER_S):
                await _until(lambda: not self._away(placed=True))
        except TimeoutError:
            raise BackendFailed(f"{self._away(placed=True)} is not there") from None
        self._started += 1
        self._ask(
            rollout_pb2.FollowResponse(
                start=self._started, meeting_host=self._meeting_host, meeting_port=free_port()
            )
        )
        return self._asked

    async def end(self) -> None:
        """No follower has a part of the engine any more: returns when all have said so, or are gone."""
        self._ask(rollout_pb2.FollowResponse())
        await _until(lambda: not any(member.start for member in list(self._members.values())))

    @property
    def broken(self) -> str:
        """What has become of the running start's followers; empty while all of its parts run."""
        if not self._asked.start:
            return ""
        if away := self._away(placed=False):
            return f"{away} is gone"
        ended = [m for m in list(self._members.values()) if m.start == self._asked.start and m.ended]
        return f"the part of {ended[0].instance} ended: {ended[0].ended}" if ended else ""

    async def hold(self, version: str) -> None:
        """Returns when the bytes of a version lie on all hosts. Raises BackendFailed where a part has ended."""

        def there() -> bool:
            if why := self.broken:
                raise BackendFailed(why)
            return all(version in member.versions for member in list(self._members.values()))

        await _until(there)

    def _ask(self, response: rollout_pb2.FollowResponse) -> None:
        self._asked = response
        for tell in list(self._tell):
            tell()

    def _away(self, *, placed: bool) -> str:
        """Names of followers that are not connected, or, with `placed`, hold no devices."""
        here = {rank for rank, member in list(self._members.items()) if member.placed or not placed}
        away = [rank for rank in range(1, self.count) if rank not in here]
        return ", ".join(self._names.get(rank, f"rank {rank} of the engine") for rank in away)


async def _until(done: Callable[[], bool]) -> None:
    """Looks again and again: what is waited for changes in another thread."""
    while True:
        if done():
            return
        await asyncio.sleep(_LOOK_S)
