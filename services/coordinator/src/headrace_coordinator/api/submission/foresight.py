"""What can be foreseen of a run that would teach little or the wrong thing: said at its submission, never refused."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.spec import RunSpec

from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.items import DataItem

LOOKED_AT = 512
"""Training items, spread over all of them."""
CHARACTERS = 8
"""Of text that a token stands for at most, on average, in any common tokenizer."""
ROUNDS = 100
"""Times that a run asks each item: far more than a data set is worth."""


def foreseen(spec: RunSpec, data: Dataset) -> str:
    """Sentences for people; empty where nothing is foreseen, as of environments, which make their own tasks."""
    if spec.environment is not None:
        return ""
    return "; ".join([*_of_items(spec, data.spread(LOOKED_AT)), *_of_amounts(spec, data.train_size)])


def _of_items(spec: RunSpec, items: list[DataItem]) -> Iterator[str]:
    answers = [item.answer.strip() for item in items if item.answer.strip()]
    if not answers:
        return
    if len(answers) >= 16 and len(set(answers)) == 1:
        yield (
            f"every reference is {answers[0][:40]!r}: one constant answer would be right for all; "
            "see data.options.answer"
        )
    most = spec.sampling.max_new_tokens
    long = sum(len(answer) > CHARACTERS * most for answer in answers)
    if 2 * long > len(answers):
        yield (
            f"{long} of {len(answers)} references are longer than {most} tokens can be: an answer that gives one whole "
            "is cut; raise sampling.max_new_tokens"
        )


def _of_amounts(spec: RunSpec, items: int) -> Iterator[str]:
    asked = spec.algorithm.prompts_per_step
    if asked > items:
        yield f"a step asks {asked} prompts of {items} items: it asks some of them more than once"
    if spec.steps * asked > ROUNDS * items:
        yield f"{spec.steps} steps ask each of {items} items {spec.steps * asked // items} times"
