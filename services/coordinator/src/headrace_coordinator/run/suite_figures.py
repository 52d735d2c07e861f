"""The figures of an evaluation from its answers, item by item. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from statistics import fmean

from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.evaluations import ModeView, SuiteResultView

from headrace_coordinator.domain.estimates import interval, item_values
from headrace_coordinator.projections.transcripts import Answer, Key
from headrace_coordinator.suites import Suite

RIGHT = "\0right"
"""The choice of every right answer, where there is one answer to an item: no text of an answer is this."""


def values(
    mode: str, asked: EvaluationSpec, suite: Suite, answers: Mapping[Key, Answer], items: int
) -> list[float]:
    """The figure of each item in a mode. KeyError where an answer is missing."""
    rows = [[answers[item, sample] for sample in range(asked.samples)] for item in range(items)]
    rewards = [[each.reward for each in row] for row in rows]
    merges = suite.one_answer and asked.reward is None
    right = asked.pass_reward if merges else inf
    choices = [
        [RIGHT if each.choice and each.reward >= right else each.choice for each in row] for row in rows
    ]
    return item_values(mode, rewards, choices, asked.pass_reward)


def result_of(
    asked: EvaluationSpec, suite: Suite, answers: Mapping[Key, Answer], items: int
) -> SuiteResultView:
    """What the evaluation found, once every item has all its answers."""
    modes: list[ModeView] = []
    for mode in asked.wanted_modes:
        found = values(mode, asked, suite, answers, items)
        low, high = interval([[value] for value in found]) or (None, None)
        modes.append(ModeView(mode=mode, score=fmean(found), low=low, high=high))
    everything = list(answers.values())
    names = sorted({name for each in everything for name in each.parts})
    return SuiteResultView(
        modes=modes,
        parts={name: fmean(each.parts.get(name, 0.0) for each in everything) for name in names},
        answers=len(everything),
        truncated=fmean(each.cut for each in everything),
        failed=sum(each.failed for each in everything),
        tokens_mean=fmean(each.tokens for each in everything),
    )
