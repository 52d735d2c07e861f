"""Learning from a step's whole batch: advantages over all of it, and several passes, at the commit.

Runs on the leader, which keeps the groups until then. Knows no wire; the step's rules are `step`'s.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Many

from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.errors import Quiesced
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.infer import InferPass
from headrace_trainer.learning.intake import Inferred, Intake, Prepared, not_finite
from headrace_trainer.learning.packing.work import (
    Finished,
    OptimizerStep,
    StepRounds,
    denominator,
    moved_far,
    plan_rounds,
)
from headrace_trainer.learning.samples import Group


class BatchLearner:
    """Keeps one run's groups, and learns from them in `passes` when the step is committed.

    Every epoch goes through the groups in an order that seed, step and epoch decide, and an optimizer step follows
    each minibatch of them. What is not finite, in whichever pass, leaves the base as it was.
    """

    def __init__(self, config: TrainerConfig, algorithm: Algorithm, rounds: StepRounds) -> None:
        self._config = config
        self._algorithm = algorithm
        self._intake = Intake(config, algorithm)
        self._rounds = rounds
        self._infer = InferPass(algorithm, self._intake, rounds)
        self._kept: dict[str, Inferred] = {}

    def learn(self, state: steps.StepState, groups: Many[Group]) -> steps.StepState:
        """The state after these groups; each one's record is in `state.groups`. Raises Refusal CONFLICT."""
        fresh: list[Group] = []
        for group in sorted(groups, key=lambda group: group.prompt_ordinal):
            record = steps.known(state, group) or self._intake.refusal(state, group)
            if record is None:
                fresh.append(group)
            else:
                state = steps.learned(state, record)
        for batch in [[group] for group in fresh] if self._config.deterministic else [fresh]:
            for inferred in self._infer(batch):
                record = self._intake.record(state, inferred.group)
                if problem := inferred.problem():
                    record = not_finite(record, problem)
                self._kept[inferred.group.digest] = inferred
                state = steps.learned(state, record)
        return state

    def finish(self, state: steps.StepState, rate: float) -> Finished:
        """All passes, or none of them. Raises Quiesced, the base restored, when a lease has lapsed in between."""
        batch = self._intake.prepare(state, [self._kept[record.digest] for record in state.accumulated])
        several = self._algorithm.passes.several
        if several:
            self._rounds.hold()
        try:
            finished = self._passes(batch, state, rate)
        except Quiesced:
            self._back(several)
            raise
        if not finished.finite:
            self._back(several)
        else:
            self.reset()
            if several:
                self._rounds.end_hold(back=False)
        return finished

    def reset(self) -> None:
        """Forgets the attempt's groups."""
        self._kept = {}

    def _back(self, held: bool) -> None:
        if held:
            self._rounds.end_hold(back=True)
        else:
            self._rounds.drop()

    def _passes(self, batch: list[Prepared], state: steps.StepState, rate: float) -> Finished:
        assert state.begun is not None
        done: list[OptimizerStep] = []
        for epoch, minibatch in self._minibatches(batch, state.begun.step):
            if epoch and done and moved_far(self._algorithm.passes, done[-1].report):
                break
            divisor = denominator(self._algorithm, (prepared.record for prepared in minibatch))
            report = self._optimize(minibatch, divisor, rate)
            if report is None or not report.finite:
                return Finished(done, False, self._suspects(minibatch))
            done.append(OptimizerStep(report, divisor, epoch))
        return Finished(done, True)

    def _minibatches(self, batch: list[Prepared], step: int) -> Iterator[tuple[int, list[Prepared]]]:
        """(epoch, groups by ordinal); as equal in size as can be."""
        passes = self._algorithm.passes
        parts = min(passes.minibatches, len(batch))
        for epoch in range(passes.epochs):
            order = list(range(len(batch)))
            random.Random(f"{self._config.seed}/passes/{step}/{epoch}").shuffle(order)
            for part in range(parts):
                chosen = order[part * len(batch) // parts : (part + 1) * len(batch) // parts]
                yield epoch, [batch[index] for index in sorted(chosen)]

    def _optimize(self, minibatch: list[Prepared], divisor: float, rate: float) -> CommitReport | None:
        """One optimizer step; None when a loss is not finite, and then some of the minibatch is accumulated."""
        if not self._accumulate(minibatch):
            return None
        return self._rounds.apply(divisor, rate)

    def _accumulate(self, minibatch: list[Prepared]) -> bool:
        groups = [prepared.sequences for prepared in minibatch]
        budget = self._config.trainer.micro_batch_tokens
        return all(self._rounds.micro(work) for work, _ in plan_rounds(groups, budget, self._rounds))

    def _suspects(self, minibatch: list[Prepared]) -> dict[str, str]:
        """Which of these groups are not finite by themselves, under the weights of the moment."""
        found = {}
        for prepared in minibatch:
            self._rounds.drop()
            if not self._accumulate([prepared]):
                found[prepared.record.digest] = not_finite(prepared.record).detail
            elif not self._rounds.holds():
                found[prepared.record.digest] = not_finite(prepared.record, "gradient").detail
        self._rounds.drop()
        return found
