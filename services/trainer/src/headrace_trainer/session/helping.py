"""Helping with a step: a helper gives the gradient of whole groups and its counts of them, the leader adds both.

Knows no rounds and no wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace_servicekit.weights.store import WeightStore
from headrace_servicekit.weights.versions import StoredWeights

from headrace_trainer.algorithms._base import Algorithm, Barrier
from headrace_trainer.backends._base import PrivateGradient
from headrace_trainer.errors import Refusal, conflict, invalid
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.samples import GroupRecord
from headrace_trainer.ranks.rank import Rank
from headrace_trainer.versions.publishing import Publisher


@dataclass(frozen=True)
class Contribution:
    """One attempt's groups at one helper. `base` is the version under which the gradient was computed."""

    step: int
    attempt: int
    base: steps.Version
    next_number: int
    helper: str
    records: tuple[GroupRecord, ...]


@dataclass(frozen=True)
class Offer:
    """A helper's contribution, published in its weight store under `name` and the attempt's next number."""

    what: Contribution
    name: str
    gradient: StoredWeights
    token_sums: Mapping[str, float]
    token_maxima: Mapping[str, float]


class Offers:
    """What a helper has published for the owners: the last gradient alone."""

    def __init__(self, store: WeightStore, run: str) -> None:
        self._store = store
        self._name = f"{run}/helpers/{store.incarnation}"
        self._publisher: Publisher | None = None
        self._last: Offer | None = None

    def given(self, step: int, attempt: int) -> Offer | None:
        """What was published for this attempt."""
        last = self._last
        return last if last and (last.what.step, last.what.attempt) == (step, attempt) else None

    def publish(self, what: Contribution, gradient: PrivateGradient) -> Offer:
        """Publishes a gradient in place of the last one."""
        if self._publisher is None:
            layout = [(name, "float32", tuple(tensor.shape)) for name, tensor in gradient.tensors.items()]
            self._publisher = Publisher(self._store, self._name, layout, kept=1)
        self._publisher.stage(what.next_number, iter(gradient.tensors.items()))
        stored = self._publisher.publish(replace(what.base, number=what.next_number))
        self._last = Offer(what, self._name, stored, gradient.token_sums, gradient.token_maxima)
        return self._last

    def close(self) -> None:
        """Drops what was published."""
        if self._publisher is not None:
            self._publisher.close()


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


def check_may_help(rank: Rank, held: steps.Version | None, base: steps.Version, *, leads: bool) -> None:
    """Raises Refusal CONFLICT for the leader of a run's steps, and INVALID for a base older than what is held."""
    check_helped(rank.algorithms[""])
    if leads or rank.ranks.world_size > 1:
        raise conflict(
            "this trainer leads the run's steps; a helper is a group of its own and restores nothing"
        )
    if held is not None and held != base and base.number <= held.number:
        raise invalid(f"version {base.number} is not above {held.number}, which is held; numbers only rise")


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


def contribution_of(state: steps.StepState, step: int, attempt: int, *, helps: bool) -> Contribution:
    """A helper's attempt as it gives it. Raises Refusal NOT_OPEN or EMPTY_STEP."""
    begun, base = steps.check_open(state, step, attempt), steps.held_version(state)
    if not helps:
        raise Refusal("NOT_OPEN", "this trainer is no helper: call Help first")
    if not (records := state.accumulated):
        raise Refusal("EMPTY_STEP", "no group is accumulated")
    return Contribution(step, attempt, base, begun.next_number, "", tuple(records))


def check_gradient(
    given: Contribution, gradient: PrivateGradient, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises Refusal INVALID for a gradient of another model, and NONFINITE."""
    if problem := gradient.difference(shapes):
        raise invalid(f"the contribution of {given.helper} is of another model: {problem}")
    if not gradient.is_finite():
        raise Refusal("NONFINITE", f"the contribution of {given.helper} is not finite")
