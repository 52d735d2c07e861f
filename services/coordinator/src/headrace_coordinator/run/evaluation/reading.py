"""The evaluation of held-out rows whose answers the data gives: the trainer reads them, and nothing is sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.resources.evaluations import EvaluationView

from headrace_coordinator.data.given import LABELS, PAIRS, STEPS, steps_of
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain.estimates import interval
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.given import told
from headrace_coordinator.run.workers.clients import Published

ROWS_AT_ONCE = 64
EXAMPLES = 5
ACCURACY, LOSS = "accuracy", "loss"
"""What the score is: how often a reward says what the data says, and the loss of an answer's tokens."""


@dataclass(frozen=True)
class Row:
    """A held-out row: what is read of it, in order, and the labels of what is judged by itself."""

    item: DataItem
    read: list[common.Trajectory]
    labels: Sequence[float] = ()


async def read_heldout(context: RunContext, published: Published) -> EvaluationView:
    """The mean loss by token of held-out answers; of pairs and of steps how often rewards say what the data says."""
    form, leader = context.dataset.given, context.workers.leader
    assert form is not None, "of a run whose data gives answers"
    rows = [_row(context, number, item) for number, item in enumerate(context.dataset.heldout_items())]
    judged = trainer.INFER_KIND_VALUES in leader.given_rewards
    losses: list[float] = []
    view: dict[str, float] = {}
    if not judged:
        read = await _read(context, rows, trainer.INFER_KIND_LOG_PROBS)
        losses = [-fmean(values[0]) for values in read]
        loss = -fmean(value for values in read for value in values[0])
        view = {"chosen_loss" if form.kind == PAIRS else "loss": loss}
    if form.kind == PAIRS:
        margins = [chosen - rejected for chosen, rejected in await _rewards(context, rows)]
        scores, measure = [float(margin > 0) for margin in margins], ACCURACY
        view["reward_margin"] = fmean(margins)
    elif form.kind == STEPS:
        found = await _rewards(context, rows)
        pairs = [[*zip(own, row.labels, strict=True)] for own, row in zip(found, rows, strict=True)]
        scores, measure = (
            [fmean((value > 0) == (label > 0.5) for value, label in own) for own in pairs],
            ACCURACY,
        )
        view["loss"] = fmean(_cross_entropy(*each) for own in pairs for each in own)
    else:
        scores, measure = losses, LOSS
    low, high = interval([[score] for score in scores]) or (None, None)
    return EvaluationView(
        kind="heldout",
        step=published.version.ordinal,
        version=published.version.number,
        score=view["loss"] if measure == LOSS else fmean(scores),
        parts=view,
        answers=sum(len(row.read) for row in rows),
        score_low=low,
        score_high=high,
        measure=measure,
        examples=[
            _example(row, score, losses[at] if losses else None) for at, (row, score) in _first(rows, scores)
        ],
    )


def _first(rows: Sequence[Row], scores: Sequence[float]) -> list[tuple[int, tuple[Row, float]]]:
    return [*enumerate(zip(rows[:EXAMPLES], scores, strict=False))]


def _example(row: Row, score: float, loss: float | None) -> dict[str, Any]:
    answer = row.read[-1 if row.labels else 0].completion_text
    return {
        "prompt": row.item.question,
        "completion": answer,
        "reference": answer,
        "reward": score if loss is None else -loss,
    }


def _row(context: RunContext, number: int, item: DataItem) -> Row:
    dataset, form = context.dataset, context.dataset.given
    assert form is not None, "of a run whose data gives answers"
    # What is said to a row's own prompt is measured: the other answer of a labelled row is to another one.
    answers = form.answers(item, item)[: 1 if form.kind == LABELS else None]
    if form.kind != STEPS:
        keys = [common.SlotKey(prompt_ordinal=number, sample_index=sample) for sample in range(len(answers))]
        return Row(item, [told(dataset, item, answers[at][0], key, 1) for at, key in enumerate(keys)])
    steps, labels = steps_of(item)
    keys = [common.SlotKey(prompt_ordinal=number, sample_index=sample) for sample in range(len(steps))]
    return Row(
        item, [told(dataset, item, answers[0][0], key, 1, at) for at, key in enumerate(keys, 1)], labels
    )


async def _rewards(context: RunContext, rows: Sequence[Row]) -> list[list[float]]:
    """Of what is read of each row, up to a factor."""
    leader = context.workers.leader
    total: list[list[float]] = [[0.0] * len(row.read) for row in rows]
    for sign, kind in zip((1, -1), leader.given_rewards, strict=False):
        found = await _read(context, rows, kind)
        for sums, own in zip(total, found, strict=True):
            for at, values in enumerate(own):
                sums[at] += sign * (fmean(values) if leader.given_by_token else math.fsum(values))
    return total


async def _read(context: RunContext, rows: Sequence[Row], kind: int) -> list[list[list[float]]]:
    """Figures of the trained tokens of all that is read of each row."""
    messages = [message for row in rows for message in row.read]
    found: list[list[float]] = []
    for first in range(0, len(messages), ROWS_AT_ONCE):
        found += await context.workers.leader.infer(messages[first : first + ROWS_AT_ONCE], kind)
    values = iter(found)
    return [[next(values) for _ in row.read] for row in rows]


def _cross_entropy(value: float, label: float) -> float:
    """Of a label in [0, 1] whose logit is the value, in a form that does not overflow."""
    return max(value, 0.0) - value * label + math.log1p(math.exp(-abs(value)))
