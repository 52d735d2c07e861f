"""What a conversation does whose context is nearly full: it goes on in a new branch, with less of what was said."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace_rollout.engines.samples import Branch, Message
from headrace_rollout.sessions.session import Place, Session
from headrace_rollout.sessions.template import turns_of
from headrace_rollout.sessions.turns import Says

Way = Literal["end", "truncate", "summarise"]
ASKED = Message(
    "user",
    "Your context is nearly full. Write down what you were asked, what you did and what you found, so that you can go "
    "on from that alone: the rest of it will be gone.",
)
"""What the policy is asked for its summary."""
CARRIED = "What was done so far:"
"""What stands before the summary, behind the first question."""


@dataclass(frozen=True)
class Overflow:
    """The way of one conversation: `says` takes its turns, and `tools` are those that its template shows."""

    way: Way
    session: Session
    says: Says
    tools: Sequence[Any] | None

    async def fit(self, place: Place, number: int) -> tuple[Place, int]:
        """Where turn `number` goes, and its number: another one where a summary was asked for before.

        A turn that does not fit even so stays where it was, and the context's limit ends it. Raises as `Session.say`.
        """
        if self.way == "end" or not place.branch.prompt_ids or self._has_room(place):
            return place, number
        messages = self.session.talk.messages
        turns = [at for at, message in enumerate(messages) if message.role == "assistant"]
        opening, last = messages[: turns[0]], turns[-1]
        if self.way == "truncate":
            return await self._newest(opening, messages, turns) or place, number
        summary = await self._summary(place.branch, number)
        shorter = await self._opened([*_carrying(opening, summary), *messages[last:]])
        messages[last + 1 : last + 1] = [ASKED, summary]  # it was asked before what came since was read
        return shorter if self._has_room(shorter) else place, number + 1

    def _has_room(self, place: Place) -> bool:
        """Whether the context has room for a turn, and for a summary after it where one is asked for then."""
        turn = self.says.stream.max_new_tokens
        needed = turn if self.way == "truncate" else 2 * turn + self._asks
        return len(place.context) + needed <= self.says.player.engine.max_context_tokens

    @property
    def _asks(self) -> int:
        """Tokens of the request for a summary."""
        return len(self.says.player.template.between((), turns_of([ASKED]), self.tools).ids)

    async def _newest(
        self, opening: Sequence[Message], messages: Sequence[Message], turns: Sequence[int]
    ) -> Place | None:
        """The opening with as many of the newest turns as leave half of the context free; None where none fits."""
        half = self.says.player.engine.max_context_tokens // 2
        first, last = 0, len(turns) - 1
        while first < last:  # each try renders the conversation anew
            middle = (first + last) // 2
            shorter = await self._opened([*opening, *messages[turns[middle] :]])
            first, last = (first, middle) if len(shorter.context) <= half else (middle + 1, last)
        shorter = await self._opened([*opening, *messages[turns[first] :]])
        return shorter if len(shorter.context) <= half or self._has_room(shorter) else None

    async def _opened(self, messages: Sequence[Message]) -> Place:
        template = self.says.player.template
        return Place(Branch(), await asyncio.to_thread(template.opened, turns_of(messages), self.tools))

    async def _summary(self, branch: Branch, number: int) -> Message:
        """The policy's summary, a turn of its own behind all that it has read."""
        template = self.says.player.template
        given = await asyncio.to_thread(template.between, branch.spoken, turns_of([ASKED]), self.tools)
        said = await self.session.say(Place(branch, given), self.says, number)
        return self.session.keep(said)


def _carrying(opening: Sequence[Message], summary: Message) -> list[Message]:
    """The opening with the summary: in its last message, as templates want users and assistants in turns."""
    *before, last = opening
    return [*before, last._replace(content=f"{last.content}\n\n{CARRIED}\n{summary.content}")]
