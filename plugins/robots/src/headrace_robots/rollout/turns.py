"""Turns of a part of the environments: the policy acts for all of them together while other parts are simulated.

Knows neither policies nor what an environment is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

RowT = TypeVar("RowT")
DecisionT = TypeVar("DecisionT")
GivenT = TypeVar("GivenT", contravariant=True)
OutcomeT = TypeVar("OutcomeT")
Decide = Callable[[Sequence[RowT]], Sequence[DecisionT] | Awaitable[Sequence[DecisionT]]]
"""The decisions for rows, at once or later."""


class Stepped(Protocol[GivenT, OutcomeT]):
    """An environment that executes decisions."""

    def begin(self, decision: GivenT, answered: asyncio.Future[OutcomeT]) -> None:
        """Starts to execute a decision; `answered` gets the outcome. Raises where it cannot start."""

    async def settled(self, outcome: OutcomeT) -> OutcomeT:
        """The outcome with all that it refers to. Raises where the environment failed."""


@dataclass(eq=False)
class _Row(Generic[RowT, DecisionT, OutcomeT]):
    environment: Stepped[DecisionT, OutcomeT]
    answered: asyncio.Future[OutcomeT]
    row: RowT | None = None
    start: Callable[[asyncio.Future[OutcomeT]], None] | None = None
    """In place of a row: begins what needs no decision."""
    decision: DecisionT | None = None
    begun: bool = False

    def begin(self) -> None:
        """Begins with the decision, or with what needs none."""
        self.begun = True
        if self.start is not None:
            self.start(self.answered)
        elif self.decision is not None:
            self.environment.begin(self.decision, self.answered)


class Turns(Generic[RowT, DecisionT, OutcomeT]):
    """Gathers the rows of one part: `decide` is called for those that wait once no environment of it is being stepped.

    A task that waits is woken once a turn, with its outcome.
    """

    def __init__(self, decide: Decide[RowT, DecisionT]) -> None:
        self._decide = decide
        self._waiting: list[_Row[RowT, DecisionT, OutcomeT]] = []
        self._stepping = 0
        self._deciding: asyncio.Task[None] | None = None
        self._scheduled = False

    async def take(self, row: RowT, environment: Stepped[DecisionT, OutcomeT]) -> tuple[DecisionT, OutcomeT]:
        """The decision for a row, made together with the others', and how the environment went on with it.

        Raises what `decide` raised, and what the environment raises.
        """
        own = _Row(environment, asyncio.get_running_loop().create_future(), row)
        outcome = await self._outcome(own)
        assert own.decision is not None
        return own.decision, outcome

    async def start(
        self,
        environment: Stepped[DecisionT, OutcomeT],
        start: Callable[[asyncio.Future[OutcomeT]], None],
    ) -> OutcomeT:
        """How an environment goes on with what needs no decision, and is begun together with the next turn's."""
        return await self._outcome(_Row(environment, asyncio.get_running_loop().create_future(), start=start))

    async def _outcome(self, own: _Row[RowT, DecisionT, OutcomeT]) -> OutcomeT:
        self._waiting.append(own)
        self._soon()
        try:
            return await own.environment.settled(await own.answered)
        finally:
            if own.begun:
                self._stepped()

    def _stepped(self) -> None:
        self._stepping -= 1
        self._soon()

    def _soon(self) -> None:
        """Schedules a turn behind the tasks that have just got their outcomes, so that their next rows are in it."""
        if not (self._scheduled or self._stepping or self._deciding):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        if self._stepping or self._deciding is not None or not self._waiting:
            return
        turn = [own for own in self._waiting if not own.answered.done()]
        self._waiting = []
        if not turn:
            return
        rows = [own.row for own in turn if own.row is not None]
        try:
            decisions = self._decide(rows) if rows else []
        except Exception as error:  # noqa: BLE001  # whatever it is, each that waits gets it
            _fail(turn, error)
            return
        if isinstance(decisions, Awaitable):
            self._deciding = asyncio.create_task(self._later(turn, decisions))
        else:
            self._go_on(turn, decisions)

    async def _later(
        self,
        turn: Sequence[_Row[RowT, DecisionT, OutcomeT]],
        decisions: Awaitable[Sequence[DecisionT]],
    ) -> None:
        try:
            found = await decisions
        except Exception as error:  # noqa: BLE001  # whatever it is, each that waits gets it
            _fail(turn, error)
        else:
            self._go_on(turn, found)
        self._deciding = None
        self._soon()

    def _go_on(self, turn: Sequence[_Row[RowT, DecisionT, OutcomeT]], decisions: Sequence[DecisionT]) -> None:
        decided = [own for own in turn if own.row is not None]
        for own, decision in zip(decided, decisions, strict=True):
            own.decision = decision
        for own in turn:
            if own.answered.done():  # it was stopped meanwhile
                continue
            self._stepping += 1
            try:
                own.begin()
            except Exception as error:  # noqa: BLE001  # the one whose environment it is gets it
                own.answered.set_exception(error)


def _fail(turn: Sequence[_Row[RowT, DecisionT, OutcomeT]], error: Exception) -> None:
    for own in turn:
        if not own.answered.done():
            own.answered.set_exception(error)
