"""What a learner asks of the trainer group, and which sequences go into which round. Knows no tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from headrace_trainer.algorithms._base import Algorithm, Passes
from headrace_trainer.backends._base import CommitReport
from headrace_trainer.learning.episodes.data import CreditData, EpisodeData, EpisodeScores
from headrace_trainer.learning.packing.packing import plan_even, plan_rows
from headrace_trainer.learning.samples import Columns, GroupRecord, Rows, Sequence


class StepRounds(Protocol):
    """The rounds of a step, as a learner asks for them. Each may raise Quiesced: then nobody began it."""

    @property
    def replicas(self) -> int:
        """Copies of the model, each of which gets an entry of work."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences of a row share what they have in common."""

    def micro(self, work: list[Rows]) -> bool:
        """Accumulates; whether it was finite everywhere. When not, nothing was accumulated."""

    def read(self, episodes: Many[EpisodeData]) -> list[EpisodeScores]:
        """Gives every rank these episodes; their scores under the weights of the moment, in any order."""

    def credit(self, data: CreditData) -> None:
        """Says what the chunks of the episodes that were read are worth."""

    def chunks(self, work: list[list[int]]) -> bool:
        """As `micro`, of numbered chunks of `credit`'s episodes."""

    def end_episodes(self, *, learned: bool) -> None:
        """Forgets the episodes; when `learned`, the normaliser learns first of what was seen in them."""

    def holds(self) -> bool:
        """Whether the accumulated gradient is finite; when it is not, the accumulators have been emptied."""

    def infer(self, groups: Many[list[Sequence]], columns: Many[str]) -> list[list[Columns]]:
        """The named columns of each sequence of each group, under the weights of the moment."""

    def apply(self, denominator: float, rate: float) -> CommitReport:
        """One optimizer step with what is accumulated, which is then empty."""

    def hold(self) -> None:
        """Keeps weights and optimizer state as they are, to go back to."""

    def end_hold(self, *, back: bool) -> None:
        """Forgets what was held; `back` returns to it first and empties the accumulators."""

    def drop(self) -> None:
        """Empties the accumulators."""


def plan_rounds(
    groups: Many[list[Sequence]], budget: int, rounds: StepRounds
) -> Iterator[tuple[list[Rows], set[int]]]:
    """(work of each replica, indices of the groups in it) of each round; no row has sequences of two groups."""
    rows = [
        (owner, length, [sequences[index] for index in members])
        for owner, sequences in enumerate(groups)
        for length, members in plan_rows(sequences, budget, shared=rounds.shares_prefixes)
    ]
    batches = plan_even([length for _, length, _ in rows], budget, rounds.replicas)
    for first in range(0, len(batches), rounds.replicas):
        chosen = batches[first : first + rounds.replicas]
        work: list[Rows] = [[rows[row][2] for row in micro] for micro in chosen]
        work += [[] for _ in range(rounds.replicas - len(work))]
        yield work, {rows[row][0] for micro in chosen for row in micro}


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
    return algorithm.denominator(sum(r.tokens for r in found), sum(r.trained_sequences for r in found))
