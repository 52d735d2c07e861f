"""Recounts a whole run from its history: what G1 and G3 promise, with nothing taken from running figures."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slot_index import FILTERED
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.domain.totals import Tally, step_dropped, step_index, step_trained

Step = ev.StepCommitted | ev.StepSkipped


def live_steps(history: Iterable[tuple[int, ev.Event]]) -> list[Step]:
    """Committed and skipped steps that no rewind abandoned, in order."""
    steps: list[Step] = []
    for _, event in history:
        if isinstance(event, ev.VersionRestored):
            steps = [step for step in steps if step_index(step) < event.frontier_step]
        elif isinstance(event, ev.StepCommitted | ev.StepSkipped):
            steps.append(event)
    return steps


def audit(run: RunState, history: Iterable[tuple[int, ev.Event]]) -> Tally:
    """The counts over the live lineage: all slots that ended, each of which may come once and only in its step."""
    ledger, found = run.ledger, Tally(steps=run.ledger.step)
    slots: set[tuple[int, int]] = set()
    for step in live_steps(history):
        trained, dropped = step_trained(step), step_dropped(step)
        slots.update((prompt, sample) for prompt, sample, _ in (*trained, *dropped))
        found.trained += len(trained)
        found.dropped += len(dropped)
        found.filtered += sum(reason == FILTERED for _, _, reason in dropped)
        if isinstance(step, ev.StepCommitted):
            found.max_staleness = max(found.max_staleness, step.certificate.max_staleness)
    own = range(ledger.shape.first_slot, ledger.frontier)
    ended = sum(
        sample < ledger.group_size and ledger.ordinal(prompt, sample) in own for prompt, sample in slots
    )
    found.duplicates = found.trained + found.dropped - ended
    found.missing = len(own) - ended
    return found
