"""The evaluation of held-out rows whose answers the data gives: the trainer reads them, and nothing is sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from headrace.common.v1 import common_pb2 as common
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.resources.evaluations import EvaluationView

from headrace_coordinator.data.given import IMITATED, LABELS
from headrace_coordinator.domain.estimates import interval
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.given import told
from headrace_coordinator.run.workers.clients import Published

ROWS_AT_ONCE = 64
EXAMPLES = 5
REFERENCED = ("dpo", "ipo", "kto")
"""Algorithms whose rewards are against the reference."""
ACCURACY, LOSS = "accuracy", "loss"
"""What the score is: how often the chosen answer's reward is the higher one, and the loss of an answer's tokens."""


async def read_heldout(context: RunContext, published: Published) -> EvaluationView:
    """The mean loss by token of held-out answers; of pairs the share whose chosen answer has the higher reward."""
    form = context.dataset.given
    assert form is not None, "of a run whose data gives answers"
    items = context.dataset.heldout_items()
    # What is said to a row's own prompt is measured: the other answer of a labelled row is to another one.
    rows = [form.answers(item, item)[: 1 if form.kind == LABELS else None] for item in items]
    messages = [
        told(context.dataset, item, answer, common.SlotKey(prompt_ordinal=number, sample_index=sample), 1)
        for number, (item, answers) in enumerate(zip(items, rows, strict=True))
        for sample, (answer, _) in enumerate(answers)
    ]
    policy = await _read(context, messages, trainer.INFER_KIND_LOG_PROBS)
    answers = iter(policy)
    own = [[next(answers) for _ in each] for each in rows]
    losses = [[-fmean(values) for values in each] for each in own]
    loss, scores = _by_token(each[0] for each in own), [each[0] for each in losses]
    if form.kind in (IMITATED, LABELS):
        score, measure, view = loss, LOSS, {"loss": loss}
    else:
        reference = iter(
            await _read(context, messages, trainer.INFER_KIND_REFERENCE_LOG_PROBS)
            if context.spec.algorithm.name in REFERENCED
            else [[0.0] * len(values) for values in policy]
        )
        mean = context.spec.algorithm.name != "dpo"
        rewards = [[_reward(values, next(reference), mean=mean) for values in each] for each in own]
        margins = [chosen - rejected for chosen, rejected in rewards]
        scores = [float(margin > 0) for margin in margins]
        score, measure = fmean(scores), ACCURACY
        view = {"chosen_loss": loss, "reward_margin": fmean(margins)}
    low, high = interval([[score] for score in scores]) or (None, None)
    return EvaluationView(
        kind="heldout",
        step=published.version.ordinal,
        version=published.version.number,
        score=score,
        parts=view,
        answers=len(messages),
        score_low=low,
        score_high=high,
        measure=measure,
        examples=[
            {"prompt": item.question, "completion": given[0][0], "reference": given[0][0], "reward": -loss[0]}
            for item, given, loss in zip(items[:EXAMPLES], rows, losses, strict=False)
        ],
    )


async def _read(context: RunContext, messages: Sequence[common.Trajectory], kind: int) -> list[list[float]]:
    """Log-probs of each answer's tokens."""
    found: list[list[float]] = []
    for first in range(0, len(messages), ROWS_AT_ONCE):
        found += await context.workers.leader.infer(messages[first : first + ROWS_AT_ONCE], kind)
    return found


def _by_token(answers: Iterator[list[float]]) -> float:
    values = [value for each in answers for value in each]
    return -fmean(values)


def _reward(values: Sequence[float], reference: Sequence[float], *, mean: bool) -> float:
    total = sum(values) - sum(reference)
    return total / len(values) if mean else total
