"""Runs that begin after others: what becomes of one, given what has become of the run before it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.domain.state import State

EXPORT = "export"
"""Directory of a run's exported model, below the run's own."""


def settled_followers(state: State) -> Iterator[list[ev.Event]]:
    """The events of each run that waits for one that has ended, those of the longest wait first."""
    for run in sorted(state.active_runs(), key=lambda run: (run.created_at, run.id)):
        if run.awaited and (events := _settled(state, run)):
            yield events


def _settled(state: State, run: RunState) -> list[ev.Event]:
    name = run.awaited
    live, ended = state.runs.get(name), state.ended.get(name)
    before = live.state if live is not None else ended.state if ended is not None else ""
    if before and before not in run_states.TERMINAL:
        return []
    if before == run_states.SUCCEEDED:
        # Runs lie beside each other; what is archived is not in memory.
        path = live.export_path if live is not None else str(Path(run.directory).parent / name / EXPORT)
        return [ev.RunFollowed(run=run.id, origin=name, path=path)]
    why = f"is {before}" if before else "was deleted"
    if live is not None and before == run_states.FAILED:
        why += f" ({live.reason})"
    return runs.plan_move(run, run_states.CANCELLED, f"run {name}, with whose export it would begin, {why}")


def pipeline(state: State, run: str, follows: Sequence[str]) -> list[str]:
    """Ids of the runs before it, itself, and those after it that have not been archived; none of a run alone."""
    behind = [each for each in state.runs.values() if run in each.follows]
    after = [each.id for each in sorted(behind, key=lambda each: (len(each.follows), each.created_at))]
    return [*follows, run, *after] if follows or after else []
