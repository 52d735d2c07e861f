"""Recounts a run from its certificates and its slot ledger: what G1 and G3 promise, checked from outside counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.runs import RunState


class Audit(msgspec.Struct):
    """Counts over the live lineage."""

    trained: int
    dropped: int
    duplicates: int
    missing: int
    max_staleness: int
    frontier: int


def live_steps(history: Iterable[tuple[int, ev.Event]]) -> list[ev.StepCommitted | ev.StepSkipped]:
    """Committed and skipped steps that no rewind abandoned, in order."""
    steps: list[ev.StepCommitted | ev.StepSkipped] = []
    for _, event in history:
        if isinstance(event, ev.VersionRestored):
            steps = [step for step in steps if step_index(step) < event.frontier_step]
        elif isinstance(event, ev.StepCommitted | ev.StepSkipped):
            steps.append(event)
    return steps


def step_index(event: ev.StepCommitted | ev.StepSkipped) -> int:
    """The batch that a committed or skipped step used up."""
    return event.certificate.step if isinstance(event, ev.StepCommitted) else event.step


class Auditor:
    """Audits one run's history while it grows: what was walked is not walked again until a rewind."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._walked = 0
        self._slots: set[tuple[int, int]] = set()
        self._trained = self._dropped = self._staleness = 0
        self._highest = self._widest = -1  # prompt and sample

    def audit(self, run: RunState, history: Sequence[tuple[int, ev.Event]]) -> Audit:
        """Walks the certificates slot by slot; nothing here trusts a counter of the coordinator's."""
        news = history[self._walked :]
        if any(isinstance(event, ev.VersionRestored) for _, event in news):
            self._begin()
            news = history
        for step in live_steps(news):
            self._walk(step)
        self._walked = len(history)
        ledger = run.ledger
        return Audit(
            trained=self._trained,
            dropped=self._dropped,
            duplicates=self._trained + self._dropped - len(self._slots),
            missing=ledger.frontier - self._below(ledger.frontier, ledger.group_size),
            max_staleness=self._staleness,
            frontier=ledger.frontier,
        )

    def _walk(self, step: ev.StepCommitted | ev.StepSkipped) -> None:
        trained: list[tuple[int, int, int]] = []
        if isinstance(step, ev.StepCommitted):
            trained, dropped = step.certificate.trained, step.certificate.dropped
            self._staleness = max(self._staleness, step.certificate.max_staleness)
        else:
            dropped = step.dropped
        slots = [(prompt, sample) for prompt, sample, _ in (*trained, *dropped)]
        self._slots.update(slots)
        self._trained += len(trained)
        self._dropped += len(dropped)
        self._highest = max([self._highest, *(prompt for prompt, _ in slots)])
        self._widest = max([self._widest, *(sample for _, sample in slots)])

    def _below(self, frontier: int, group_size: int) -> int:
        """How many of the slots below the frontier ended."""
        if self._widest < group_size and (self._highest + 1) * group_size <= frontier:
            return len(self._slots)  # as ever in a sound run: no need to look at each
        return sum(
            sample < group_size and prompt * group_size + sample < frontier for prompt, sample in self._slots
        )


def audit(run: RunState, history: Sequence[tuple[int, ev.Event]]) -> Audit:
    """The counts of a whole history."""
    return Auditor().audit(run, history)
