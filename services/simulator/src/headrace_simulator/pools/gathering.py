"""Operations of environments that one call steps: actions wait until all whose episodes go on have one. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from headrace_simulator.pools.ledger import EnvironmentLedger, Operation, Outcome

Authority = Callable[[], str | None]
"""Why the caller may not act now; None where it may. Asked right before the effect."""


@dataclass
class Part:
    """Operations of one message, and the outcomes that they come to."""

    operations: Sequence[Operation]
    authority: Authority
    outcomes: asyncio.Future[list[Outcome]]


class Gathering:
    """The operations of one child's environments, a batch at a time.

    Actions wait for those of the other episodes, at most `limit_s`; an episode whose action is not among those that run
    is abandoned, since it may go on without one. A reset runs with the actions that wait as it comes, else at once.
    """

    def __init__(
        self,
        ledgers: Sequence[EnvironmentLedger],
        run: Callable[[Sequence[Part]], Coroutine[None, None, None]],
        start: Callable[[Coroutine[None, None, None]], object],
        limit_s: float,
    ) -> None:
        self._ledgers = {ledger.environment: ledger for ledger in ledgers}
        self._run, self._start, self._limit_s = run, start, limit_s
        self._waiting: list[Part] = []
        self._running = self._late = False
        self._timer: asyncio.TimerHandle | None = None

    async def outcomes(self, operations: Sequence[Operation], authority: Authority) -> list[Outcome]:
        """The outcomes of a message's operations, once they have run."""
        # A repetition is answered with what the first one comes to.
        while twice := self._holding(operations):
            await asyncio.wait({part.outcomes for part in twice})
        part = Part(operations, authority, asyncio.get_running_loop().create_future())
        if any(self._ledgers[each.environment].goes_on_with(each) for each in operations):
            self._waiting.append(part)
            self._look()
        else:  # Their outcomes are known, or they are refused: others wait for what their caller does next.
            await self._run([part])
        return await part.outcomes

    def go_on(self) -> None:
        """Waits no longer."""
        self._late = bool(self._waiting)
        self._look()

    def abandon_but(self, operations: Sequence[Operation]) -> None:
        """Right before they run: the episodes without an action go on for nobody."""
        if not any(self._ledgers[operation.environment].acts_with(operation) for operation in operations):
            return
        there = {operation.environment for operation in operations}
        for ledger in self._ledgers.values():
            if ledger.acting and ledger.environment not in there:
                ledger.abandon(
                    "others that are stepped in one call with it went on, as no action of it came within "
                    f"{self._limit_s:g} s"
                )

    def close(self) -> None:
        """Nothing that waits is run."""
        self._end_timer()
        self._waiting = []

    def _holding(self, operations: Sequence[Operation]) -> list[Part]:
        mine = {operation.environment for operation in operations}
        return [part for part in self._waiting if mine & {each.environment for each in part.operations}]

    def _missing(self) -> bool:
        """Whether actions wait for those of other episodes."""
        waiting = {each.environment: each for part in self._waiting for each in part.operations}
        if not any(self._ledgers[environment].acts_with(each) for environment, each in waiting.items()):
            return False
        return any(each.acting and each.environment not in waiting for each in self._ledgers.values())

    def _look(self) -> None:
        """Runs what waits, unless a batch runs (behind which this is asked again) or an action is missing."""
        if self._running or not self._waiting:
            return
        if self._late or not self._missing():
            self._running = True
            self._start(self._go())
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self.go_on)

    async def _go(self) -> None:
        self._end_timer()
        parts, self._waiting, self._late = self._waiting, [], False
        try:
            await self._run(parts)
        finally:
            self._running = False
        self._look()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
