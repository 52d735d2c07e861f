"""One slot of an open step, its states, and an index of the open steps' slots. Knows no event."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

PENDING, ASSIGNED, FINISHED, SETTLED, ACCUMULATED, DROPPED = (
    "PENDING",
    "ASSIGNED",
    "FINISHED",
    "SETTLED",
    "ACCUMULATED",
    "DROPPED",
)

OPEN = frozenset({PENDING, ASSIGNED, FINISHED})
"""States of a slot whose group is neither settled nor dropped."""
FILTERED = "FILTERED"
"""The reason of a dropped group whose rewards are all equal: the algorithm asks for it, so it is no failure."""


class Slot(msgspec.Struct):
    """One sample of one prompt within an open step."""

    prompt: int
    sample: int
    state: str = PENDING
    attempt: int = 0
    holder: str = ""
    digest: str = ""
    tokens: int = 0
    reward: float = 0.0
    reason: str = ""
    failures: int = 0
    """Attempts of this attempt at the step that ended with an error."""

    @property
    def key(self) -> tuple[int, int]:
        """Prompt ordinal and sample index."""
        return self.prompt, self.sample


class SlotIndex:
    """The slots of open steps by state, prompt and holder. The ledger keeps it up to date."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.fresh: dict[int, set[int]] = {}
        """Samples that wait for their first attempt, by prompt."""
        self.returned: dict[int, set[int]] = {}
        """Samples that wait for another attempt, by prompt."""
        self.held: dict[str, set[tuple[int, int]]] = {}
        """Assigned (prompt, sample)s, by holder."""
        self.waiting = self.assigned = 0
        """Counts of slots that no rollout has, and of slots that one has."""
        self.open: set[int] = set()
        """Prompts whose group is neither settled nor dropped."""
        self.settled: set[int] = set()
        """Prompts whose group is settled, and not yet accumulated or dropped."""
        self._none_open_below = 0
        for slot in slots:
            self.enter(slot)

    def any_open(self, prompts: range) -> bool:
        """Whether a group of successive prompts is neither settled nor dropped.

        Groups close and never open again, so what was looked at and is closed is not looked at again.
        """
        prompt = max(self._none_open_below, prompts.start)
        while prompt < prompts.stop and prompt not in self.open:
            prompt += 1
        self._none_open_below = prompt
        return prompt < prompts.stop

    def enter(self, slot: Slot) -> None:
        """Adds a slot that has entered its state."""
        if slot.state == PENDING:
            wanted = self.returned if slot.attempt else self.fresh
            wanted.setdefault(slot.prompt, set()).add(slot.sample)
            self.waiting += 1
        elif slot.state == ASSIGNED:
            self.held.setdefault(slot.holder, set()).add((slot.prompt, slot.sample))
            self.assigned += 1
        if slot.state in OPEN:
            self.open.add(slot.prompt)
        elif slot.state == SETTLED:
            self.settled.add(slot.prompt)

    def leave(self, slot: Slot) -> None:
        """Removes a slot that is about to leave its state."""
        if slot.state == PENDING:
            wanted = self.returned if slot.attempt else self.fresh
            wanted[slot.prompt].discard(slot.sample)
            if not wanted[slot.prompt]:
                del wanted[slot.prompt]
            self.waiting -= 1
        elif slot.state == ASSIGNED:
            self.held[slot.holder].discard((slot.prompt, slot.sample))
            self.assigned -= 1

    def close(self, prompt: int) -> None:
        """All slots of a group are about to enter one state."""
        self.open.discard(prompt)
        self.settled.discard(prompt)
