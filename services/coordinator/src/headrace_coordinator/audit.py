"""Recounts a run from its certificates and its slot ledger: what G1 and G3 promise, checked from outside counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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


def audit(run: RunState, history: Iterable[tuple[int, ev.Event]]) -> Audit:
    """Walks the certificates slot by slot; nothing here trusts a counter."""
    trained: Counter[tuple[int, int]] = Counter()
    dropped: Counter[tuple[int, int]] = Counter()
    staleness = 0
    for step in live_steps(history):
        if isinstance(step, ev.StepCommitted):
            trained.update((prompt, sample) for prompt, sample, _ in step.certificate.trained)
            dropped.update((prompt, sample) for prompt, sample, _ in step.certificate.dropped)
            staleness = max(staleness, step.certificate.max_staleness)
        else:
            dropped.update((prompt, sample) for prompt, sample, _ in step.dropped)
    terminal = trained + dropped
    expected = {divmod(ordinal, run.ledger.group_size) for ordinal in range(run.ledger.frontier)}
    return Audit(
        trained=sum(trained.values()),
        dropped=sum(dropped.values()),
        duplicates=sum(count - 1 for count in terminal.values()),
        missing=len(expected - terminal.keys()),
        max_staleness=staleness,
        frontier=run.ledger.frontier,
    )
