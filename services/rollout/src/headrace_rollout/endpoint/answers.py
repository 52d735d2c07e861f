"""What holds for the answers of sessions, and requests that repeat one another. Knows no HTTP and no simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace_servicekit.tool_calls import Call, beside_calls

from headrace_rollout.conversations.speaker import Asked
from headrace_rollout.conversations.template import TurnTemplate
from headrace_rollout.endpoint.requests import ChatRequest, Refusal
from headrace_rollout.engines.samples import Distribution, Stream, TrajectoryUpdate

if TYPE_CHECKING:
    from headrace_modelkit.tokenizer import TextCodec


class Says(Protocol):
    """What asks the policy for turns, such as a Speaker."""

    async def say(self, asked: Asked) -> TrajectoryUpdate:
        """The end of the turn, or its stop from outside."""


@dataclass(frozen=True)
class Terms:
    """What holds for all sessions of a stream; `most_turns` 0 is no limit, `most_tokens` is the context's."""

    model: str
    stream: Stream
    codec: TextCodec
    template: TurnTemplate
    most_turns: int
    most_tokens: int
    tool_calls: str
    """The form of calls of tools."""
    asked: bool = True
    """Requests say how their tokens are drawn; else the stream does, whatever they say."""

    def calls_of(self, text: str, names: Container[str]) -> tuple[str, list[Call]]:
        """The text of a turn beside its calls of tools of these names, and these."""
        return beside_calls(self.tool_calls, text, names)

    def drawn_from(self, request: ChatRequest) -> Distribution | None:
        """What its tokens are drawn from; None: as the stream says. Raises Refusal."""
        return request.drawn_from(self.stream.distribution) if self.asked else None


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


@dataclass(eq=False)
class Exchange:
    """A request under way, or answered; `waiting` callers want its answers. `lost`: one left as they were there."""

    request: ChatRequest
    key: str
    answers: asyncio.Future[list[Answer]]
    waiting: int = 0
    lost: bool = False


Told = Callable[[int, int, Sequence[int], Sequence[float]], None]
"""Is told new ids with their log-probs: (number of the first choice, choice, ids, log-probs)."""


def repeated(
    exchanges: Iterable[Exchange], request: ChatRequest, key: str, *, again: bool
) -> Exchange | None:
    """What a request repeats, of the newest first: by its key, by its word, or as an equal one that nobody got."""
    for each in exchanges:
        equal = each.request == request
        if key and each.key == key and not equal:
            message = f"Idempotency-Key: {key[:80]!r} was the key of another request; give each its own"
            raise Refusal(400, "invalid_request", message)
        if equal and ((key and each.key == key) or again or each.lost):
            each.lost = False
            return each
    return None


async def all_of(turns: Sequence[Any]) -> list[Any]:
    """All results in order; where one fails, the others are ended."""
    tasks = [asyncio.ensure_future(turn) for turn in turns]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
