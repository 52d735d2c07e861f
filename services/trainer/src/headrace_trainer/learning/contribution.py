"""What a helper gives to the owners of a model: the gradient of whole groups, and its own counts of them.

Knows no rounds and no wire.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace_trainer.algorithms._base import Algorithm, Barrier
from headrace_trainer.errors import Refusal, conflict, invalid
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.samples import GroupRecord


@dataclass(frozen=True)
class Contribution:
    """One attempt's groups at one helper. `base` is the version under which the gradient was computed."""

    step: int
    attempt: int
    base: steps.Version
    next_number: int
    helper: str
    records: tuple[GroupRecord, ...]


def check_helped(algorithm: Algorithm) -> None:
    """Raises Refusal INVALID for an algorithm whose step is no plain sum over groups."""
    why = ""
    if algorithm.barrier is Barrier.BATCH or algorithm.passes.several:
        why = "learns from the whole batch at once"
    elif algorithm.columns or algorithm.critic is not None:
        why = "needs a reference model or a critic, which a helper does not hold"
    elif algorithm.state():
        why = "carries a state of its own from micro-batch to micro-batch"
    if why:
        raise invalid(
            f"trainer.helpers: the algorithm {why}; set trainer.helpers: 0, or choose one that streams, such as grpo "
            "with one epoch, one minibatch and no KL term",
            key="trainer.helpers",
        )


def add_records(state: steps.StepState, given: Contribution) -> tuple[steps.StepState, bool]:
    """The state with the contribution's groups; false, and the same state, for one that is in already.

    Raises Refusal NOT_OPEN, POLICY_MISMATCH, STALE, or CONFLICT when one of its groups was learned otherwise: then
    nothing of it may be added.
    """
    steps.check_open(state, given.step, given.attempt)
    base = steps.held_version(state)
    if (given.base.number, given.base.digest) != (base.number, base.digest):
        raise Refusal(
            "POLICY_MISMATCH",
            f"the contribution of {given.helper} was computed under version {given.base.number} with digest "
            f"{given.base.digest}; step {given.step} begins with version {base.number}, digest {base.digest}",
        )
    if state.careful:
        raise Refusal(
            "CAREFUL",
            f"step {given.step} is replayed group by group after a gradient that was not finite; send the groups here",
        )
    records = [replace(record, helper=given.helper) for record in given.records]
    present = [state.groups.get(record.prompt_ordinal) for record in records]
    if all(
        own is not None and own.digest == r.digest and own.helper == r.helper
        for own, r in zip(present, records, strict=True)
    ):
        return state, False
    if taken := [own.prompt_ordinal for own in present if own is not None]:
        raise conflict(
            f"prompt {taken[0]} is in the step already, and not from {given.helper}: nothing was added"
        )
    for record in records:
        lag = steps.staleness(state, set(record.tokens_by_version))
        state = steps.learned(state, replace(record, staleness=lag))
    return state, True
