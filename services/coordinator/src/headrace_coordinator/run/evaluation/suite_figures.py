"""The figures of an evaluation from its answers, item by item; those that failed count for nothing. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean

import msgspec
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.resources.evaluations import ModeView, SuiteResultView, TaskView

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain.episode_figures import OUTCOME, figures_of, measured, says_success
from headrace_coordinator.domain.estimates import interval, item_values
from headrace_coordinator.projections.transcripts import Answer, Key
from headrace_coordinator.suites import Suite

RIGHT = "\0right"
"""The choice of every right answer, where there is one answer to an item: no text of an answer is this."""


def values(
    mode: str, asked: EvaluationSpec, suite: Suite, answers: Mapping[Key, Answer], items: int
) -> dict[int, float]:
    """The figure of each item in a mode, by its index. KeyError where an answer was not asked for yet.

    An answer with a failure counts for nothing: avg and maj take the others, and an item has no figure that is left
    without an answer, or in pass@K with fewer than K.
    """
    answers = _settled(asked, suite, answers)
    fewest = int(mode.partition("@")[2]) if mode.startswith("pass@") else 1
    whole = {
        item: [each for sample in range(asked.samples) if not (each := answers[item, sample]).failure]
        for item in range(items)
    }
    answered = {item: row for item, row in whole.items() if len(row) >= fewest}
    rows = answered.values()
    rewards = [[each.reward for each in row] for row in rows]
    merges = suite.one_answer and asked.reward is None
    right = asked.pass_reward if merges else inf
    choices = [
        [RIGHT if each.choice and each.reward >= right else each.choice for each in row] for row in rows
    ]
    found = item_values(mode, rewards, choices, asked.pass_reward)
    return dict(zip(answered, found, strict=True))


def _measure(asked: EvaluationSpec, suite: Suite) -> str:
    return (asked.reward or suite.reward()).measure


def _settled(asked: EvaluationSpec, suite: Suite, answers: Mapping[Key, Answer]) -> Mapping[Key, Answer]:
    """The same; an episode that did not say its success, where others of a later block did, has failed."""
    episodes = [each.episode for each in answers.values() if each.episode is not None]
    if _measure(asked, suite) != OUTCOME or not says_success(episodes):
        return answers
    return {
        key: msgspec.structs.replace(each, reward=0.0)
        if each.episode and each.episode.success is None
        else each
        for key, each in answers.items()
    }


def result_of(
    asked: EvaluationSpec, suite: Suite, answers: Mapping[Key, Answer], items: Sequence[DataItem]
) -> SuiteResultView:
    """What the evaluation found, once every item has all its answers."""
    found = {mode: values(mode, asked, suite, answers, len(items)) for mode in asked.wanted_modes}
    modes = [
        ModeView(mode=mode, score=fmean(each), low=low, high=high)
        for mode, of in found.items()
        if (each := [*of.values()])
        for low, high in [_limits(each)]
    ]
    everything = [each for each in answers.values() if not each.failure]
    failures = [each.failure for each in answers.values() if each.failure]
    episodes = [each.episode for each in everything if each.episode is not None]
    measure, note = measured(_measure(asked, suite) if episodes else "", episodes)
    names = sorted({name for each in everything for name in each.parts})
    return SuiteResultView(
        modes=modes,
        tasks=_tasks(suite, items, found[asked.wanted_modes[0]]),
        parts={name: fmean(each.parts[name] for each in everything if name in each.parts) for name in names},
        answers=len(everything),
        truncated=fmean(each.cut for each in everything),
        unanswered=len(failures),
        failure=next(iter(failures), ""),
        tokens_mean=fmean(each.tokens for each in everything),
        measure=measure,
        episodes=figures_of(episodes),
        note=note,
    )


def _tasks(suite: Suite, items: Sequence[DataItem], found: Mapping[int, float]) -> list[TaskView]:
    """The figure of each task, and of each of its variants behind it."""
    by_task: dict[tuple[str, str], list[float]] = defaultdict(list)
    for index, value in found.items():
        by_task[suite.task_of(items[index])].append(value)
    by_task.pop(("", ""), None)
    return [
        TaskView(task=task, variant=variant, items=len(each), score=fmean(each), low=low, high=high)
        for (task, variant), each in sorted(by_task.items())
        for low, high in [_limits(each)]
    ]


def _limits(found: Sequence[float]) -> tuple[float | None, float | None]:
    return interval([[value] for value in found]) or (None, None)
