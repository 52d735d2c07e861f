"""Requests of a session and their answers, and requests that repeat one another. Knows no HTTP and no simulator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_rollout.endpoint.requests import ChatRequest, Refusal

REMEMBERED = 256
"""Requests of a session, the last ones, whose answers can be asked for again or named."""


@dataclass(frozen=True)
class Terms:
    """What holds for the requests of all sessions of a stream."""

    model: str
    tool_calls: str
    """The form of calls of tools."""
    most_turns: int = 0
    """Requests of a session; 0: no limit."""
    asked: bool = True
    """Requests say how their tokens are drawn; else the stream does, whatever they say."""
    hints: bool = False
    """What asks for a form into which nothing forces an answer is a hint; else such a request is refused."""
    rewards: bool = False
    """A session has to come to a reward."""


@dataclass(frozen=True)
class Answer:
    """A turn of the policy as an agent gets it; `tokens` are (bytes, log-prob) of each, `ids` those of the calls."""

    number: int
    content: str
    calls: tuple[tuple[str, str], ...]
    finish: str
    prompt_tokens: int
    tokens: tuple[tuple[bytes, float], ...]
    ids: tuple[str, ...] = ()


Told = Callable[[int, int, Sequence[int], Sequence[float]], None]
"""Is told new ids with their log-probs: (number of the first choice, choice, ids, log-probs)."""


@dataclass(eq=False)
class Exchange:
    """A request under way, or answered; `waiting` callers want its answers. `lost`: one left as they were there."""

    request: ChatRequest
    key: str
    answers: asyncio.Future[list[Answer]]
    waiting: int = 0
    lost: bool = False

    @property
    def answered(self) -> bool:
        """Whether it has its answers."""
        return self.answers.done() and not self.answers.cancelled() and self.answers.exception() is None

    async def wait(self) -> list[Answer]:
        """Its answers. Cancelled, it ends the request where nobody else waits. Raises Refusal."""
        self.waiting += 1
        try:
            return await asyncio.shield(self.answers)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise session_over() from None  # not whoever asks was ended, but what was asked for
            self.lost = self.answers.done()
            raise
        finally:
            self.waiting -= 1
            if not self.waiting and not self.answers.done():
                self.answers.cancel()
                await asyncio.wait({self.answers})


class Exchanges:
    """Those of a session, the last ones; of a request that failed nothing stays."""

    def __init__(self) -> None:
        self._kept: deque[Exchange] = deque(maxlen=REMEMBERED)
        self.count = 0
        """Requests that did not fail."""

    @property
    def under_way(self) -> bool:
        """Whether a request is."""
        return any(not each.answers.done() for each in self._kept)

    def repeated(self, request: ChatRequest, key: str, *, again: bool) -> Exchange | None:
        """What a request repeats, of the newest first: by its key, by its word, or as an equal one that nobody got."""
        for each in reversed(self._kept):
            equal = each.request == request
            if key and each.key == key and not equal:
                message = f"Idempotency-Key: {key[:80]!r} was the key of another request; give each its own"
                raise Refusal(400, "invalid_request", message)
            if equal and ((key and each.key == key) or again or each.lost):
                each.lost = False
                return each
        return None

    def begin(self, request: ChatRequest, key: str, work: Coroutine[Any, Any, list[Answer]]) -> Exchange:
        """A request that `work` answers."""
        exchange = Exchange(request, key, asyncio.ensure_future(work))
        self.count += 1
        self._kept.append(exchange)
        exchange.answers.add_done_callback(lambda _: self._forget_failed(exchange))
        return exchange

    def of_answer(self, number: int) -> tuple[ChatRequest, Answer] | None:
        """A request that was answered with this turn, and the answer; None for one that is not remembered."""
        answered = [each for each in self._kept if each.answered]
        found = (
            (each.request, answer)
            for each in answered
            for answer in each.answers.result()
            if answer.number == number
        )
        return next(found, None)

    def end(self) -> None:
        """Ends those that are under way."""
        for each in self._kept:
            each.answers.cancel()

    def _forget_failed(self, exchange: Exchange) -> None:
        if not exchange.answered:
            self.count -= 1
            if exchange in self._kept:
                self._kept.remove(exchange)


def session_over() -> Refusal:
    """The refusal of what came too late."""
    return Refusal(503, "session_over", "this session has ended; an agent's begins anew")


async def all_of(turns: Sequence[Any]) -> list[Any]:
    """All results in order; where one fails, the others are ended."""
    tasks = [asyncio.ensure_future(turn) for turn in turns]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
