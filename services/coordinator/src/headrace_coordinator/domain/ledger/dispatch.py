"""Which rollout makes which sample: in a fixed order, as rollouts have room; samples of a lost one are made again.

Pure rules over the slot ledger, which alone holds the assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import ceil

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slot_index import DROPPED, Slot, SlotIndex
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage

GroupWork = tuple[int, list[int]]
"""A prompt ordinal with the sample indices to make."""


class DispatchOrder:
    """The order in which the groups of one step start. Knows no rollout."""

    def __init__(self, prompts: Iterable[int], expected: Callable[[int], float] | None = None) -> None:
        """`expected` gives a prompt's expected tokens; the longest start first. Without it: by ordinal."""
        self.ranked = expected is not None
        self._prompts: list[int] = []
        self._expected = expected
        self._next = 0
        self._end = 0
        self.reach(prompts)

    def reach(self, prompts: Iterable[int]) -> None:
        """Appends those of `prompts` that are above all that it has."""
        added = sorted(prompt for prompt in prompts if prompt >= self._end)
        if not added:
            return
        self._end = added[-1] + 1
        if (expected := self._expected) is not None:
            added.sort(key=lambda prompt: -expected(prompt))
        self._prompts += added

    def waiting(self, index: SlotIndex) -> Iterator[GroupWork]:
        """Groups with unassigned samples: first those that are made again, by ordinal."""
        for prompt in sorted(index.returned):
            yield prompt, sorted(index.returned[prompt])
        while self._next < len(self._prompts) and self._prompts[self._next] not in index.fresh:
            self._next += 1  # A group that was assigned does not come back to this list.
        for place in range(self._next, len(self._prompts)):
            if samples := index.fresh.get(self._prompts[place]):
                yield self._prompts[place], sorted(samples)


def plan_dispatch(
    index: SlotIndex, order: DispatchOrder, holder: str, capacity: int, holders: int, below: int
) -> list[GroupWork]:
    """Groups for `holder` to start now: its even share of what is left, at most `capacity` samples at once.

    It has no credit for prompts from `below` on: see `credit`.

    Where the longest start first and everything can start at once, the share is one group of every few: the longest
    ones in a row would leave one holder the whole tail.
    """
    if not index.waiting:
        return []
    holds = len(index.held.get(holder, ()))
    share = ceil((index.waiting + index.assigned) / max(holders, 1))
    room = min(capacity, share) - holds
    every = max(1, round(index.waiting / room)) if order.ranked and room > 0 and share <= capacity else 1
    planned: list[GroupWork] = []
    waiting = (work for work in order.waiting(index) if work[0] < below)
    for prompt, samples in islice(waiting, 0, None, every):
        if len(samples) > room and (holds or planned):
            break
        planned.append((prompt, samples))
        room -= len(samples)
    return planned


def credit(ledger: SlotLedger, lineage: Lineage, installed: int, max_staleness: int) -> int:
    """The prompt ordinal below which a rollout with version `installed` may start slots, so that G3 will hold.

    A step that is n behind the one that is learned will have a base of an ordinal that is at most n higher.
    """
    lag = lineage.staleness(installed, lineage.head)
    if lag is None or lag > max_staleness:
        return 0
    return ledger.prompts_of(ledger.step + max_staleness - lag).stop


def plan_assign(ledger: SlotLedger, run: str, slots: list[Slot], holder: str) -> ev.SlotsAssigned:
    """Gives each of `slots` a fresh attempt number, higher than any ever used in the run."""
    return ev.SlotsAssigned(
        run=run,
        slots=[
            (slot.prompt, slot.sample, ledger.last_attempt + 1 + index, holder)
            for index, slot in enumerate(slots)
        ],
    )


def plan_return(run: str, slots: Iterable[Slot], *, failed: bool = False) -> list[ev.Event]:
    """These slots are to be made again; `failed` when their attempts ended with an error. Nothing for no slot."""
    keys = [(slot.prompt, slot.sample, slot.attempt) for slot in slots]
    return [ev.SlotsReturned(run=run, slots=keys, failed=failed)] if keys else []


def plan_refill(ledger: SlotLedger, run: str, limit: int, *, whole: bool) -> list[ev.Event]:
    """The next groups in place of those that were dropped before they settled, at most `limit` of them in a step.

    For the first step that lacks some: what it takes changes what the steps behind it have.

    Each dropped group has one other in its place, whenever it was dropped, so that which groups a step has depends on
    what became of each and not on times. `whole`: not before no group is open, so that the times at which groups start
    do not depend on the order in which others end either.
    """
    if limit <= 0 or (whole and ledger.index.open):
        return []
    for step, open_step in ledger.steps.items():
        groups = min(ledger.lacking(step), limit - open_step.refilled)
        if groups > 0:
            return [ev.StepRefilled(run=run, step=step, groups=groups)]
    return []


def accepts(slot: Slot | None, attempt: int, digest: str) -> str:
    """Empty when a finished attempt may fill its slot, else why not; the same one may be offered again."""
    if slot is None:
        return "not a slot of an open step"
    if slot.attempt != attempt:
        return f"attempt {attempt} is not the assigned attempt {slot.attempt}"
    if slot.state == DROPPED:
        return "the slot is dropped"
    if slot.digest and slot.digest != digest:
        return f"attempt {attempt} was already offered with digest {slot.digest}"
    return ""
