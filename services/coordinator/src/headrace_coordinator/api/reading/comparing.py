"""Two evaluations of the same items, compared item by item from their transcripts. Synchronous."""

from __future__ import annotations

from pathlib import Path

from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import problem
from headrace_schema.resources.evaluations import ComparisonView, DifferenceView
from headrace_schema.resources.views import RunView

from headrace_coordinator.api.control import Refused
from headrace_coordinator.domain import estimates
from headrace_coordinator.projections.transcripts import Answer, Key, read_answers
from headrace_coordinator.run.evaluation.suite_figures import values
from headrace_coordinator.suites import open_suite

SCORE = "score"
"""Mean reward of all answers: what any two evaluations have."""


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
    differences = [_difference(mode, earlier, later) for mode in modes]
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

    def values(self, mode: str) -> list[float]:
        """The figure of each item."""
        asked = self.asked
        mode = f"avg@{asked.samples}" if mode == SCORE else mode
        try:
            return values(mode, asked, self.suite, self.answers, self.items)
        except KeyError as error:
            raise self._gone(f"that of item {error.args[0]} is missing") from error

    def _gone(self, why: str) -> Refused:
        message = f"the transcripts of {self.run.id} in {self.run.run_directory} are incomplete: {why}"
        return Refused("UNAVAILABLE", message)


def _difference(mode: str, earlier: _Answered, later: _Answered) -> DifferenceView:
    found = estimates.compare(earlier.values(mode), later.values(mode))
    return DifferenceView(
        mode=mode,
        first=found.first,
        second=found.second,
        difference=found.second - found.first,
        low=found.low,
        high=found.high,
        wins=found.wins,
        losses=found.losses,
        ties=found.ties,
        p_value=found.p_value,
    )


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
