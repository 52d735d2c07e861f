"""Turns of a part of the environments: the policy acts for all of them together while other parts are simulated.

Knows neither policies nor environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

RowT = TypeVar("RowT")
DecisionT = TypeVar("DecisionT")


class Turns(Generic[RowT, DecisionT]):
    """Gathers the rows of one part: `act` is called for those that wait once no environment of it is being stepped."""

    def __init__(self, act: Callable[[Sequence[RowT]], Awaitable[Sequence[DecisionT]]]) -> None:
        self._act = act
        self._waiting: list[tuple[RowT, asyncio.Future[DecisionT]]] = []
        self._stepping = 0
        self._acting: asyncio.Task[None] | None = None

    async def decide(self, row: RowT) -> DecisionT:
        """The decision for a row, made together with the others'. Raises what `act` raised."""
        future: asyncio.Future[DecisionT] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, future))
        self._begin()
        return await future

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around a step: the others' next turn waits for it."""
        self._stepping += 1
        try:
            yield
        finally:
            self._stepping -= 1
            if not self._stepping:
                # Who was stepped last asks for its next decision first, so that it is in the turn.
                asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        if self._stepping or self._acting is not None:
            return
        turn = [(row, future) for row, future in self._waiting if not future.done()]
        self._waiting = []
        if turn:
            self._acting = asyncio.create_task(self._take(turn))

    async def _take(self, turn: Sequence[tuple[RowT, asyncio.Future[DecisionT]]]) -> None:
        try:
            decisions = await self._act([row for row, _ in turn])
        except Exception as error:  # noqa: BLE001  # whatever it is, each that waits gets it
            for _, future in turn:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), decision in zip(turn, decisions, strict=True):
                if not future.done():
                    future.set_result(decision)
        self._acting = None
        # Behind those that go on to step with their decisions.
        asyncio.get_running_loop().call_soon(self._begin)
