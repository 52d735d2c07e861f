"""A commit's optimizer steps: what is asked of the trainer group, at which rates, and several passes over a batch.

Knows no tensors; the step's rules are `step`'s.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import OptimizerSection

from headrace_trainer.algorithms._base import Algorithm, CriticPlan, Passes
from headrace_trainer.errors import Quiesced
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import (
    Columns,
    CreditData,
    EpisodeData,
    EpisodeScores,
    GroupRecord,
    LentPictures,
    Rows,
    Sample,
)
from headrace_trainer.learning.step import StepState, not_finite

Batch = TypeVar("Batch")
Part = TypeVar("Part")


@dataclass(frozen=True)
class CommitReport:
    """One optimizer step. `grad_norm` is global, before clipping; `critic_grad_norm` is of the critic's own weights.

    When one of them is not finite nothing changed.

    `token_sums` and `token_maxima` are figures over all ranks since the last `zero`, with the number of
    tokens they are over under "tokens". `differs`: of a run that is deterministic, the first token whose log-prob is
    not the engine's to the bit; then nothing changed either.
    """

    finite: bool
    grad_norm: float
    token_sums: dict[str, float] = field(default_factory=dict)
    token_maxima: dict[str, float] = field(default_factory=dict)
    critic_grad_norm: float = 0.0
    differs: str = ""


class StepRounds(Protocol):
    """The rounds in which a policy computes, as its learner asks for them. Each may raise Quiesced: none began it."""

    optimizer: OptimizerSection | None
    """Parameters of AdamW that stand in for those that steps were made with so far."""

    @property
    def replicas(self) -> int:
        """Copies of the model, each of which gets an entry of work."""

    @property
    def micro_batch_tokens(self) -> int:
        """Most tokens of a micro-batch: the run's, or fewer once a device had no room for so many."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences of a row share what they have in common."""

    @property
    def costs(self) -> Costs:
        """What micro-batches cost beside each other."""

    def micro(self, work: Many[list[Rows]]) -> list[bool]:
        """Accumulates micro-batches, each with an entry for each replica; whether each was finite everywhere.

        Of one that was not nothing was accumulated.
        """

    def balance(self, works: Many[list[Rows]], denominator: float) -> None:
        """Counts which experts the tokens of all these works go to, and lets the micro-batches until the next optimizer
        step add the load-balance loss over them, times `denominator`.
        """

    def holds(self) -> bool:
        """Whether the accumulated gradient is finite; when it is not, the accumulators have been emptied."""

    def infer(self, groups: Many[list[Sample]], columns: Many[str]) -> list[list[Columns]]:
        """The named columns of each sequence of each group, under the weights of the moment."""

    def apply(self, denominator: float, rate: float, critic_rate: float) -> CommitReport:
        """One optimizer step with what is accumulated, which is then empty; the critic's own weights at their rate."""

    def drop(self) -> None:
        """Empties the accumulators, of all policies."""


class EpisodeRounds(StepRounds, Protocol):
    """Rounds of episodes beside those."""

    def read(self, episodes: Many[EpisodeData], owners: Many[int]) -> list[EpisodeScores]:
        """Gives every rank these episodes, and their pictures to the replica that owns each; their scores under the
        weights of the moment, in any order.
        """

    def credit(self, data: CreditData) -> None:
        """Says what the chunks of the episodes that were read are worth."""

    def chunks(self, work: Many[list[int]], lent: Many[LentPictures]) -> bool:
        """As `micro`, of one micro-batch of numbered chunks of `credit`'s episodes, with pictures that are not the
        replica's own.
        """

    def end_episodes(self, *, learned: bool) -> None:
        """Drops the episodes; when `learned`, the normaliser learns first of what was seen in them."""


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of a commit: what it reports, what its sums were divided by, and its epoch from 0."""

    report: CommitReport
    denominator: float
    epoch: int = 0


@dataclass(frozen=True)
class Finished:
    """How a step's learning ended. When `finite` is false the base is still held and nothing is accumulated.

    `suspects` are then the groups that are not finite by themselves: digest → what is wrong.
    """

    steps: list[OptimizerStep]
    finite: bool
    suspects: Mapping[str, str] = field(default_factory=dict)


def moved_far(passes: Passes, report: CommitReport) -> bool:
    """Whether the policy has moved further from the old one than `target_kl` lets it."""
    target, sums = passes.target_kl, report.token_sums
    return target is not None and sums.get("own.approx_kl", 0.0) > target * max(1.0, sums["tokens"])


def denominator(algorithm: Algorithm, records: Iterable[GroupRecord]) -> float:
    """What the sums over these groups are divided by."""
    found = list(records)
    tokens = sum(r.tokens if r.weighed_tokens is None else r.weighed_tokens for r in found)
    return algorithm.denominator(tokens, sum(r.trained_sequences for r in found))


class PassesLearner(ABC, Generic[Batch, Part]):
    """Learns from a step's whole batch when the step is committed: an optimizer step follows each minibatch."""

    def __init__(self, config: TrainerConfig, algorithm: Algorithm, rounds: StepRounds) -> None:
        self._config = config
        self._rounds = rounds
        self._passes = algorithm.passes

    def finish(self, state: StepState, rate: float, critic_rate: float = 0.0) -> Finished:
        """All passes; after some of them alone its caller returns to the base, which it holds where they are several.

        Raises Quiesced when a lease has lapsed in between.
        """
        batch = self._lay_out(state)
        assert state.begun is not None
        done: list[OptimizerStep] = []
        try:
            for epoch, minibatch in self._minibatches(batch, state.begun.step):
                if epoch and done and moved_far(self._passes, done[-1].report):
                    break
                divisor = self._divisor(batch, minibatch)
                fit = self._accumulate(minibatch)
                report = self._rounds.apply(divisor, rate, critic_rate) if fit else None
                if report is None or not report.finite:
                    return Finished(done, False, self._suspects(batch, state, minibatch))
                done.append(OptimizerStep(report, divisor, epoch))
        except Quiesced:
            self._rounds.drop()
            raise
        self._learned()
        return Finished(done, True)

    def _suspects(self, batch: Batch, state: StepState, minibatch: list[Part]) -> dict[str, str]:
        """Which groups of the minibatch are not finite by themselves, under the weights of the moment."""
        found = {}
        for record, own in self._by_group(batch, state, minibatch):
            self._rounds.drop()
            if not self._accumulate(own):
                found[record.digest] = not_finite(record).detail
            elif not self._rounds.holds():
                found[record.digest] = not_finite(record, "gradient").detail
        self._rounds.drop()
        return found

    @abstractmethod
    def _lay_out(self, state: StepState) -> Batch:
        """What the passes go through."""

    @abstractmethod
    def _minibatches(self, batch: Batch, step: int) -> Iterator[tuple[int, list[Part]]]:
        """(epoch, minibatch), in an order that seed, step and epoch decide; as equal in size as can be."""

    @abstractmethod
    def _divisor(self, batch: Batch, minibatch: list[Part]) -> float:
        """What the minibatch's sum is divided by."""

    @abstractmethod
    def _accumulate(self, minibatch: list[Part]) -> bool:
        """Accumulates its gradient; whether it was finite everywhere."""

    @abstractmethod
    def _by_group(
        self, batch: Batch, state: StepState, minibatch: list[Part]
    ) -> Iterable[tuple[GroupRecord, list[Part]]]:
        """The minibatch's parts of each group."""

    @abstractmethod
    def _learned(self) -> None:
        """All passes are done: what was kept is dropped."""


def step_rates(
    config: OptimizerSection, critic: CriticPlan | None, step: int, run_steps: int
) -> tuple[float, float]:
    """Rates of the policy and of the critic's own weights in step `step`; 0 for what does not learn yet."""
    rate = learning_rate(config, step, run_steps)
    if critic is None:
        return rate, 0.0
    own = config.model_copy(update={"lr": critic.learning_rate or config.lr})
    return 0.0 if step < critic.warmup_steps else rate, learning_rate(own, step, run_steps)


def learning_rate(config: OptimizerSection, step: int, run_steps: int) -> float:
    """Rate of step `step` (from 0), as transformers' schedules: linear warm-up from 0, then the named decay.

    So the first step of a warm-up moves nothing, there as here. Decays to `final_fraction` of the peak at
    `total_steps` (default: the run's steps) and stays there.
    """
    schedule = config.schedule
    if step < schedule.warmup_steps:
        return config.lr * step / schedule.warmup_steps
    total = schedule.total_steps or run_steps
    done = (step - schedule.warmup_steps) / max(1, total - schedule.warmup_steps)
    left = {
        "constant": lambda: 1.0,
        "linear": lambda: 1.0 - min(1.0, done),
        "cosine": lambda: 0.5 * (1.0 + math.cos(math.pi * min(1.0, done))),
    }[schedule.name]()
    return config.lr * (schedule.final_fraction + (1.0 - schedule.final_fraction) * left)
