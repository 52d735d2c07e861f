"""Turns of a part of the environments: the policy acts for all of them together while other parts are simulated.

Knows neither policies nor environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Playing(Protocol):
    """What takes turns."""

    @property
    def begun(self) -> bool:
        """Whether it needs a decision: else its turn begins it."""

    def fail(self, error: Exception) -> None:
        """Ends it."""


PlayingT = TypeVar("PlayingT", bound=Playing)
DecisionsT = TypeVar("DecisionsT")
Decide = Callable[[Sequence[PlayingT]], DecisionsT | Awaitable[DecisionsT]]
"""The decisions for those, at once or later."""
Act = Callable[[Sequence[PlayingT], DecisionsT | None, Sequence[PlayingT]], None]
"""Goes on with those that have a decision each, and begins the others. Some may have left meanwhile: it asks them."""


class Turns(Generic[PlayingT, DecisionsT]):
    """Gathers those of one part: `decide` is called for all that wait once none of them is being stepped."""

    def __init__(self, decide: Decide[PlayingT, DecisionsT], act: Act[PlayingT, DecisionsT]) -> None:
        self._decide, self._act = decide, act
        # Dicts keep the order in which they came.
        self._waiting: dict[PlayingT, None] = {}
        self._acting: dict[PlayingT, None] = {}
        self._deciding: asyncio.Task[None] | None = None
        self._scheduled = False

    def join(self, playing: PlayingT) -> None:
        """Is in the next turn."""
        self._acting.pop(playing, None)
        self._waiting[playing] = None
        self._soon()

    def leave(self, playing: PlayingT) -> None:
        """Is in no turn any more, and none waits for it."""
        self._waiting.pop(playing, None)
        self._acting.pop(playing, None)
        self._soon()

    def _soon(self) -> None:
        """Schedules a turn behind all that answers now, so that what answers is in it."""
        if self._waiting and not (self._scheduled or self._acting or self._deciding):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        if self._acting or self._deciding is not None:
            return
        turn, self._waiting = list(self._waiting), {}
        self._acting = dict.fromkeys(turn)
        asked = [each for each in turn if each.begun]
        new = [each for each in turn if not each.begun]
        try:
            decisions = self._decide(asked) if asked else None
        except Exception as error:  # noqa: BLE001  # whatever it is, each that waits gets it
            self._fail(asked, error)
            asked, decisions = [], None
        if isinstance(decisions, Awaitable):
            self._deciding = asyncio.create_task(self._later(asked, decisions, new))
        else:
            self._act(asked, decisions, new)

    async def _later(
        self, asked: Sequence[PlayingT], decisions: Awaitable[DecisionsT], new: Sequence[PlayingT]
    ) -> None:
        found: DecisionsT | None = None
        try:
            found = await decisions
        except Exception as error:  # noqa: BLE001  # whatever it is, each that waits gets it
            self._fail(asked, error)
            asked = []
        self._deciding = None
        self._act(asked, found, [each for each in new if each in self._acting])
        self._soon()

    def _fail(self, asked: Sequence[PlayingT], error: Exception) -> None:
        for playing in asked:
            if playing in self._acting:
                playing.fail(error)
