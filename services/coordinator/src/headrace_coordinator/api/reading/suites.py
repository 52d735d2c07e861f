"""Evaluations of suites: lists, videos, and two of the same items compared item by item from their transcripts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import problem
from headrace_schema.resources.evaluations import (
    ComparisonView,
    DifferenceView,
    EvaluationRunView,
)
from headrace_schema.resources.views import RunView

from headrace_coordinator.api.reading.presenters import evaluation_run_view
from headrace_coordinator.api.reading.reads import Page, Reads
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import estimates
from headrace_coordinator.projections.transcripts import Answer, Key, read_answers
from headrace_coordinator.run.evaluation.suite_figures import values
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.suites import open_suite

SCORE = "score"
"""Mean reward of all answers: what any two evaluations have."""


class SuiteEvaluations:
    """Evaluations as people read them."""

    def __init__(self, event_log: EventLog, reads: Reads) -> None:
        self._event_log = event_log
        self._reads = reads

    def suite_evaluations(self, size: int, after: str = "") -> Page[EvaluationRunView, str]:
        """Evaluations behind evaluation `after`, newest first; ValueError when it is not one of the list."""
        state = self._event_log.state
        names = [
            name
            for name in self._reads.newest_first()
            if (
                state.runs[name].evaluation is not None
                if name in state.runs
                else state.ended[name].evaluation
            )
        ]
        start = names.index(after) + 1 if after else 0
        shown = names[start : start + size]
        views = [evaluation_run_view(self._reads.run(name)) for name in shown]
        return views, shown[-1] if start + size < len(names) else None

    def suite_evaluation(self, evaluation_id: str) -> EvaluationRunView:
        """One evaluation; NOT_FOUND names the nearest id, or says that it is a run that trains."""
        run = self._reads.run(evaluation_id)
        if run.suite is None:
            raise Refused("NOT_FOUND", f"{run.id} is a run that trains; see /v1/runs/{run.id}")
        return evaluation_run_view(run)

    async def compare_evaluations(self, first: str, second: str) -> ComparisonView:
        """Second minus first, item by item. INVALID for evaluations that cannot be compared, with the reason."""
        return await asyncio.to_thread(compare, self._reads.run(first), self._reads.run(second))


def compare(first: RunView, second: RunView) -> ComparisonView:
    """The paired differences of the figures that both have.

    Raises Refused: INVALID for evaluations that did not succeed or asked other items, UNAVAILABLE where transcripts
    are gone.
    """
    for key, run in (("first", first), ("second", second)):
        _finished(key, run)
    assert first.suite is not None and second.suite is not None
    if (first.suite.data_digest, first.suite.items) != (second.suite.data_digest, second.suite.items):
        reason = f"{second.id} asked other items ({_items(second)}) than {first.id} ({_items(first)})"
        fix = "compare evaluations with the same suite, options, limit and data"
        raise _incomparable("second", reason, fix)
    earlier, later = _Answered(first), _Answered(second)
    modes = [mode for mode in earlier.asked.wanted_modes if mode in later.asked.wanted_modes] or [SCORE]
    differences = [found for mode in modes if (found := _difference(mode, earlier, later)) is not None]
    if not differences:
        reason = f"no item was answered in both, {first.id} and {second.id}"
        raise _incomparable("second", reason, "evaluate again what failed")
    return ComparisonView(first=first.id, second=second.id, items=first.suite.items, differences=differences)


class _Answered:
    """An evaluation with its answers."""

    def __init__(self, run: RunView) -> None:
        assert run.suite is not None
        self.run, self.items = run, run.suite.items
        self.asked = EvaluationSpec.model_validate(run.suite.spec)
        self.suite = open_suite(self.asked.suite.name, self.asked.suite.options)
        try:
            self.answers: dict[Key, Answer] = read_answers(Path(run.run_directory), self.suite.extract)
        except OSError as error:
            raise self._gone(str(error)) from error

    def values(self, mode: str) -> dict[int, float]:
        """The figure of each item that was answered."""
        asked = self.asked
        mode = f"avg@{asked.samples}" if mode == SCORE else mode
        try:
            return values(mode, asked, self.suite, self.answers, self.items)
        except KeyError as error:
            raise self._gone(f"that of item {error.args[0]} is missing") from error

    def _gone(self, why: str) -> Refused:
        message = f"the transcripts of {self.run.id} in {self.run.run_directory} are incomplete: {why}"
        return Refused("CONFLICT", message)


def _difference(mode: str, earlier: _Answered, later: _Answered) -> DifferenceView | None:
    """Over the items that have a figure in both; None without one."""
    before, after = earlier.values(mode), later.values(mode)
    both = sorted(before.keys() & after.keys())
    if not both:
        return None
    found = estimates.compare([before[item] for item in both], [after[item] for item in both])
    return DifferenceView.of(found, mode=mode, difference=found.second - found.first)


def _finished(key: str, run: RunView) -> None:
    if run.suite is None:
        fix = "name an evaluation that `headrace eval list` shows"
        raise _incomparable(key, f"{run.id} is a run that trains and no evaluation", fix)
    if run.suite.result is None:
        fix = "wait until it has succeeded" if not run.ended else "name one that has succeeded"
        raise _incomparable(key, f"{run.id} is {run.state} and has no result", fix)


def _incomparable(key: str, reason: str, fix: str) -> Refused:
    return Refused("INVALID", f"cannot be compared: {reason}", [problem(key, reason, fix)])


def _items(run: RunView) -> str:
    assert run.suite is not None
    return f"{run.suite.items} of {run.suite.suite}, digest {run.suite.data_digest[:8]}"
