"""Operations of environments that one call steps: actions wait until all whose episodes go on have one. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from headrace.simulator.v1 import simulator_pb2

from headrace_simulator.batches import ChunkBatch, operations_of
from headrace_simulator.pools.ledger import EnvironmentLedger, Operation, Outcome

Authority = Callable[[], str | None]
"""Why the caller may not act now; None where it may. Asked right before the effect."""


Outcomes = list[Outcome] | simulator_pb2.StepResponse
"""One by one, or with those of a batch's rows together."""


@dataclass
class Part:
    """Operations of one message, some of them maybe as a batch, and the outcomes that they come to."""

    operations: Sequence[Operation]
    batch: ChunkBatch | None
    authority: Authority
    outcomes: asyncio.Future[Outcomes]

    @cached_property
    def acts(self) -> dict[int, int]:
        """Step index of each environment that acts."""
        found = {each.environment: each.step_index for each in self.operations if not each.HasField("reset")}
        if self.batch is not None:
            found |= zip(self.batch.environments, self.batch.step_indices, strict=True)
        return found

    @cached_property
    def resets(self) -> dict[int, int]:
        """Step index of each environment that begins an episode."""
        return {each.environment: each.step_index for each in self.operations if each.HasField("reset")}

    @property
    def environments(self) -> set[int]:
        """All of them."""
        return {*self.acts, *self.resets}

    def each(self) -> list[Operation]:
        """All operations, one by one."""
        return [*self.operations, *(operations_of(self.batch) if self.batch is not None else ())]


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

    async def outcomes(
        self, operations: Sequence[Operation], batch: ChunkBatch | None, authority: Authority
    ) -> Outcomes:
        """The outcomes of a message's operations, once they have run."""
        part = Part(operations, batch, authority, asyncio.get_running_loop().create_future())
        # A repetition is answered with what the first one comes to.
        while twice := [other for other in self._waiting if part.environments & other.environments]:
            await asyncio.wait({other.outcomes for other in twice})
        if self._goes_on(part):
            self._waiting.append(part)
            if due := self._due():
                await self._go(due)
        else:  # Their outcomes are known, or they are refused: others wait for what their caller does next.
            await self._run([part])
        return await part.outcomes

    def go_on(self) -> None:
        """Waits no longer."""
        self._late = bool(self._waiting)
        self._look()

    def abandon_but(self, acts: Mapping[int, int], resets: Collection[int]) -> None:
        """Right before they run: the episodes without an action go on for nobody."""
        if not any(self._ledgers[environment].acts_at(index) for environment, index in acts.items()):
            return
        for ledger in self._ledgers.values():
            if ledger.acting and ledger.environment not in acts and ledger.environment not in resets:
                ledger.abandon(
                    "others that are stepped in one call with it went on, as no action of it came within "
                    f"{self._limit_s:g} s"
                )

    def close(self) -> None:
        """Nothing that waits is run."""
        self._end_timer()
        self._waiting = []

    def _goes_on(self, part: Part) -> bool:
        """Whether any of its operations is the next one of its environment."""
        return any(self._ledgers[each].acts_at(index) for each, index in part.acts.items()) or any(
            self._ledgers[each].begins_at(index) for each, index in part.resets.items()
        )

    def _missing(self) -> bool:
        """Whether actions wait for those of other episodes."""
        acts = {each: index for part in self._waiting for each, index in part.acts.items()}
        if not any(self._ledgers[each].acts_at(index) for each, index in acts.items()):
            return False
        there = {each for part in self._waiting for each in part.environments}
        return any(each.acting and each.environment not in there for each in self._ledgers.values())

    def _look(self) -> None:
        if due := self._due():
            self._start(self._go(due))

    def _due(self) -> list[Part]:
        """What runs now: nothing where a batch runs (behind which this is asked again), or an action is missing."""
        if self._running or not self._waiting:
            return []
        if not self._late and self._missing():
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._limit_s, self.go_on)
            return []
        self._end_timer()
        parts, self._waiting, self._late, self._running = self._waiting, [], False, True
        return parts

    async def _go(self, parts: Sequence[Part]) -> None:
        try:
            await self._run(parts)
        finally:
            self._running = False
        self._look()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
