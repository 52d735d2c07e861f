"""From settled groups to rounds, as they come: packs, accumulates, and tells what became of each group.

Runs on the leader. Knows no wire and no optimizer; the step's rules are `step`'s.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.infer import InferPass
from headrace_trainer.learning.intake import Intake, Prepared, not_finite
from headrace_trainer.learning.packing.work import (
    Finished,
    OptimizerStep,
    StepRounds,
    denominator,
    plan_rounds,
)
from headrace_trainer.learning.samples import Group, GroupRecord


class Learner:
    """Accumulates the gradients of one run's groups as they come; one optimizer step a commit."""

    def __init__(self, config: TrainerConfig, algorithm: Algorithm, rounds: StepRounds) -> None:
        self._config = config
        self._algorithm = algorithm
        self._intake = Intake(config, algorithm)
        self._rounds = rounds
        self._infer = InferPass(algorithm, self._intake, rounds)

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""
        fresh: list[Group] = []
        for group in sorted(groups, key=lambda group: group.prompt_ordinal):
            record = steps.known(state, group) or self._intake.refusal(state, group)
            if record is None:
                fresh.append(group)
            else:
                state = steps.learned(state, record)
        # One packing a group, whatever else has arrived, is what makes two runs equal; and finds a culprit.
        apart = self._config.deterministic or state.careful
        for groups in [[group] for group in fresh] if apart else [fresh]:
            state, batch = self._prepare(state, groups)
            state = self._accumulate(state, batch)
            if state.careful and batch and not self._rounds.holds():
                state = _quarantined(state, batch[0].record)
        return state

    def _prepare(self, state: steps.StepState, groups: Many[Group]) -> tuple[steps.StepState, list[Prepared]]:
        """What is to be accumulated, and the state after those groups whose columns are not finite."""
        batch: list[Prepared] = []
        for inferred in self._infer(groups):
            if problem := inferred.problem():
                record = not_finite(self._intake.record(state, inferred.group), problem)
                state = steps.learned(state, record)
            else:
                batch += self._intake.prepare(state, [inferred])
        return state, batch

    def finish(self, state: steps.StepState, rate: float) -> Finished:
        """Applies what is accumulated."""
        divisor = denominator(self._algorithm, state.accumulated)
        report = self._rounds.apply(divisor, rate)
        return Finished([OptimizerStep(report, divisor)], report.finite)

    def reset(self) -> None:
        """Forgets the attempt; what is accumulated is the trainer group's."""

    def _accumulate(self, state: steps.StepState, batch: list[Prepared]) -> steps.StepState:
        """Learns a batch of groups; those in a non-finite round are tried again, each alone."""
        inside, outside = self._run(batch)
        for index, prepared in enumerate(batch):
            if index not in outside:
                state = steps.learned(state, prepared.record)
            elif len(batch) == 1 or index in inside:
                state = steps.learned(
                    state, not_finite(prepared.record), taint=_taint(index in inside, prepared)
                )
            else:
                state = self._accumulate(state, [prepared])
        return state

    def _run(self, batch: list[Prepared]) -> tuple[set[int], set[int]]:
        """Runs the batch; which groups have rows inside the accumulators, and which have rows left outside."""
        inside: set[int] = set()
        outside: set[int] = set()
        groups = [prepared.sequences for prepared in batch]
        for work, owners in plan_rounds(groups, self._config.trainer.micro_batch_tokens, self._rounds):
            (inside if self._rounds.micro(work) else outside).update(owners)
        return inside, outside


def _quarantined(state: steps.StepState, record: GroupRecord) -> steps.StepState:
    """Without the group, and without hope for the attempt: what the others had accumulated went with it."""
    taint = f"prompt {record.prompt_ordinal} has a gradient that is not finite"
    return steps.learned(state, not_finite(record, "gradient"), taint=taint)


def _taint(partly_inside: bool, prepared: Prepared) -> str:
    """Why the attempt cannot be committed when a part of a refused group is already accumulated."""
    ordinal = prepared.record.prompt_ordinal
    return (
        f"prompt {ordinal} was found not finite after a part of it was accumulated" if partly_inside else ""
    )
