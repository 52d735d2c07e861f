"""Learning from groups of answers: as they come, or from a step's whole batch in several passes at the commit.

Runs on the leader. Knows no wire; the step's rules are `step`'s.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many

from headrace_schema.openings import TrainerConfig
from typing_extensions import override

from headrace_trainer.algorithms._base import Algorithm, balance_loss_of, bias_rate_of
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.intake import Intake, Prepared, admitted, columns_problem
from headrace_trainer.learning.passes import Finished, OptimizerStep, PassesLearner, StepRounds, denominator
from headrace_trainer.learning.planning import plan_rounds
from headrace_trainer.learning.samples import Group, GroupRecord, Rows, Sample


class Learner:
    """Accumulates the gradients of one run's groups as they come; one optimizer step a commit."""

    def __init__(self, config: TrainerConfig, algorithm: Algorithm, rounds: StepRounds) -> None:
        self._config = config
        self._algorithm = algorithm
        self._intake = Intake(config, algorithm)
        self._rounds = rounds

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""
        state, fresh = admitted(state, groups, self._config.algorithm.max_staleness)
        # Packed alone, groups make runs that can be repeated, and a group that is not finite is found.
        apart = self._config.deterministic or state.careful
        for some in [[group] for group in fresh] if apart else [fresh]:
            state, batch = self._prepare(state, some)
            pending = [batch]
            while pending:  # Those in a micro-batch that is not finite are tried again, each alone.
                part = pending.pop(0)
                plan = planned([prepared.samples for prepared in part], self._rounds)
                found = self._rounds.micro([work for work, _ in plan])
                inside: set[int] = set()
                outside: set[int] = set()
                for finite, (_, owners) in zip(found, plan, strict=True):
                    (inside if finite else outside).update(owners)
                state, again = _learned(state, part, inside, outside)
                pending += [[prepared] for prepared in again]
            if state.careful and batch and not self._rounds.holds():
                state = _quarantined(state, batch[0].record)
        return state

    def _prepare(self, state: steps.StepState, groups: Many[Group]) -> tuple[steps.StepState, list[Prepared]]:
        """What is to be accumulated, and the state after those groups whose columns are not finite."""
        batch: list[Prepared] = []
        for group in self._intake.inferred(groups, self._rounds):
            if problem := columns_problem(group):
                record = steps.not_finite(self._intake.record(state, group), problem)
                state = steps.learned(state, record)
            else:
                batch += self._intake.prepare(state, [group])
        return state, batch

    def finish(self, state: steps.StepState, rate: float, critic_rate: float = 0.0) -> Finished:
        """Applies what is accumulated."""
        divisor = denominator(self._algorithm, state.accumulated)
        report = self._rounds.apply(divisor, rate, critic_rate)
        return Finished([OptimizerStep(report, divisor)], report.finite)

    def reset(self) -> None:
        """Nothing is kept here: what is accumulated lies on the ranks."""


class BatchLearner(PassesLearner[list[Prepared], Prepared]):
    """Keeps one run's groups, and learns from them in `passes` when the step is committed."""

    def __init__(self, config: TrainerConfig, algorithm: Algorithm, rounds: StepRounds) -> None:
        super().__init__(config, algorithm, rounds)
        self._algorithm = algorithm
        self._intake = Intake(config, algorithm)
        self._kept: dict[str, Group] = {}

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""
        state, fresh = admitted(state, groups, self._config.algorithm.max_staleness)
        for batch in [[group] for group in fresh] if self._config.deterministic else [fresh]:
            for group in self._intake.inferred(batch, self._rounds):
                record = self._intake.record(state, group)
                if problem := columns_problem(group):
                    record = steps.not_finite(record, problem)
                self._kept[group.digest] = group
                state = steps.learned(state, record)
        return state

    def reset(self) -> None:
        """Drops the attempt's groups."""
        self._kept = {}

    @override
    def _lay_out(self, state: steps.StepState) -> list[Prepared]:
        return self._intake.prepare(state, [self._kept[record.digest] for record in state.accumulated])

    @override
    def _minibatches(self, batch: list[Prepared], step: int) -> Iterator[tuple[int, list[Prepared]]]:
        # Of a policy that nobody spoke to: one without a gradient a pass, as in a step that streams.
        parts = max(1, min(self._passes.minibatches, len(batch)))
        for epoch in range(self._passes.epochs):
            order = list(range(len(batch)))
            random.Random(f"{self._config.seed}/passes/{step}/{epoch}").shuffle(order)
            for part in range(parts):
                chosen = order[part * len(batch) // parts : (part + 1) * len(batch) // parts]
                yield epoch, [batch[index] for index in sorted(chosen)]

    @override
    def _divisor(self, batch: list[Prepared], minibatch: list[Prepared]) -> float:
        return denominator(self._algorithm, (prepared.record for prepared in minibatch))

    @override
    def _accumulate(self, minibatch: list[Prepared]) -> bool:
        groups = [prepared.samples for prepared in minibatch]
        works = [work for work, _ in planned(groups, self._rounds)]
        if balance_loss_of(self._algorithm) or bias_rate_of(self._algorithm):
            self._rounds.balance(works, self._divisor([], minibatch))
        return all(self._rounds.micro(works))

    @override
    def _by_group(
        self, batch: list[Prepared], state: steps.StepState, minibatch: list[Prepared]
    ) -> Iterable[tuple[GroupRecord, list[Prepared]]]:
        return ((prepared.record, [prepared]) for prepared in minibatch)

    @override
    def _learned(self) -> None:
        self.reset()


def planned(groups: Many[list[Sample]], rounds: StepRounds) -> list[tuple[list[Rows], set[int]]]:
    """Work of the rounds that go through these groups, with the groups in each."""
    plan = plan_rounds(
        groups,
        rounds.micro_batch_tokens,
        replicas=rounds.replicas,
        shared=rounds.shares_prefixes,
        costs=rounds.costs,
    )
    return list(plan)


def _learned(
    state: steps.StepState, batch: list[Prepared], inside: set[int], outside: set[int]
) -> tuple[steps.StepState, list[Prepared]]:
    """The state after a batch, and the groups that are to be tried again alone.

    `inside` are those with rows in the accumulators, `outside` those with rows that were not finite, by place.
    """
    again = []
    for index, prepared in enumerate(batch):
        if index not in outside:
            state = steps.learned(state, prepared.record)
        elif len(batch) > 1 and index not in inside:
            again.append(prepared)
        else:
            ordinal = prepared.record.prompt_ordinal
            why = f"prompt {ordinal} was found not finite after a part of it was accumulated"
            state = steps.learned(
                state, steps.not_finite(prepared.record), taint=why if index in inside else ""
            )
    return state, again


def _quarantined(state: steps.StepState, record: GroupRecord) -> steps.StepState:
    """Refuses the group, and the attempt's commit: the other groups' gradient was dropped with this one's."""
    taint = f"prompt {record.prompt_ordinal} has a gradient that is not finite"
    return steps.learned(state, steps.not_finite(record, "gradient"), taint=taint)
