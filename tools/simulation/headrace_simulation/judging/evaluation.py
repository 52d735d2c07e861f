"""What must hold of an evaluation: each answer once, none lost, and the figures those of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.projections.lines import read_lines
from headrace_coordinator.projections.trajectories import NAME, SettledTrajectory
from headrace_coordinator.store.run_files import Item
from headrace_schema.evaluating import EvaluationSpec

from headrace_simulation.fleet.reward import reward_of
from headrace_simulation.judging.judge import Violation

SlotKey = tuple[int, int]


def judge_evaluation(run: runs.RunState, asked: EvaluationSpec, history: Sequence[Item]) -> None:
    """Raises `Violation` when an answer is missing or doubled, or a figure is not what its answers say."""
    evaluation = run.evaluation
    if evaluation is None:
        raise Violation(f"evaluation: {run.id} became a run that trains")
    if run.ledger.step or run.lineage.head:
        raise Violation(f"evaluation: {run.id} trained {run.ledger.step} steps")
    written = _written(run)
    wanted = {(item, sample) for item in range(evaluation.items) for sample in range(asked.samples)}
    if stray := sorted(written - wanted):
        raise Violation(f"evaluation: {run.id} has answers that nobody asked for: {stray}")
    _check_progress(run, history, len(written))
    if run.state == run_states.SUCCEEDED:
        if lost := sorted(wanted - written):
            raise Violation(f"evaluation: {run.id} ended without the answers {lost}")
        _check_figures(run, asked)


def _written(run: runs.RunState) -> set[SlotKey]:
    """Keys of the transcripts' lines; raises `Violation` for a line that comes twice or has a wrong reward."""
    lines = [
        msgspec.json.decode(line, type=SettledTrajectory)
        for _, line in read_lines(Path(run.directory) / NAME)
    ]
    counts = Counter((line.prompt_ordinal, line.sample_index) for line in lines)
    if twice := sorted(key for key, count in counts.items() if count > 1):
        raise Violation(f"evaluation: {run.id} has the answers {twice} twice")
    for line in lines:
        if line.reward != reward_of(line.prompt_ordinal, line.sample_index):
            raise Violation(f"evaluation: {run.id} scored {line.prompt_ordinal}, {line.sample_index} wrongly")
    return set(counts)


def _check_progress(run: runs.RunState, history: Sequence[Item], written: int) -> None:
    """Raises `Violation` unless the reported progress only grows, is on the disk, and is of one set of weights."""
    told = [event for _, event in history if isinstance(event, ev.EvaluationProgressed)]
    counts = [event.answers for event in told]
    if counts != sorted(counts) or (counts and counts[-1] > written):
        raise Violation(f"evaluation: {run.id} told of {counts} answers and has {written}")
    if len({event.digest for event in told if event.digest}) > 1:
        raise Violation(f"evaluation: {run.id} was answered by several sets of weights")


def _check_figures(run: runs.RunState, asked: EvaluationSpec) -> None:
    evaluation = run.evaluation
    assert evaluation is not None and evaluation.result is not None
    rows = [[reward_of(i, s) for s in range(asked.samples)] for i in range(evaluation.items)]
    expected = {"avg": fmean(map(fmean, rows)), "pass": fmean(map(max, rows))}
    for found in evaluation.result["modes"]:
        mode = found["mode"].partition("@")[0]
        if mode in expected and abs(found["score"] - expected[mode]) > 1e-9:
            raise Violation(f"evaluation: {run.id} found {found}, its answers say {expected[mode]}")
    if evaluation.result["answers"] != evaluation.total or evaluation.answers != evaluation.total:
        raise Violation(f"evaluation: {run.id} shows {evaluation.answers} of {evaluation.total} answers")
