"""The rounds in which one of a run's policies computes, as its learner on the leader asks for them. Knows no steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager

from headrace_schema.sections.learning import OptimizerSection
from headrace_servicekit.failpoints import failpoint_sync
from typing_extensions import override

from headrace_trainer.backends._base import Backend, CommitReport
from headrace_trainer.errors import OutOfMemory
from headrace_trainer.learning.figures import differing
from headrace_trainer.learning.passes import EpisodeRounds
from headrace_trainer.learning.planning import Costs, plan_rounds
from headrace_trainer.learning.samples import (
    Columns,
    CreditData,
    EpisodeData,
    EpisodeScores,
    LentPictures,
    Rows,
    Sample,
)
from headrace_trainer.ranks import messages
from headrace_trainer.ranks.rounds import Rounds

TOGETHER_S, MOST_TOGETHER = 1.0, 16
"""Leases are asked, and devices released, between two announcements: so one is for no more than about a second."""


class PolicyRounds(EpisodeRounds):
    """Of the policy `policy`; "" is the run's own. Each raises what `Rounds.lead` raises."""

    def __init__(self, rounds: Rounds, policy: str = "") -> None:
        self._rounds, self._policy = rounds, policy
        self.optimizer: OptimizerSection | None = None
        """Parameters of AdamW that stand in for those that steps were made with so far."""
        self._together = 1
        """How many micro-batches are announced at once: as many as take TOGETHER_S."""

    @property
    def _backend(self) -> Backend:
        return self._rounds.rank.backends[self._policy]

    @property
    def _algorithm_state(self) -> dict[str, float]:
        return self._rounds.rank.algorithms[self._policy].state()

    @contextmanager
    def _reducing(self, *, divisible: bool) -> Iterator[None]:
        """After a device had no room for what its body computes, the next try needs less; the error says what."""
        may_recompute = self._backend.may_recompute
        try:
            yield
        except OutOfMemory as short:
            self._rounds.rank.reduced.reduce(short, divisible=divisible, may_recompute=may_recompute)
            raise

    @property
    @override
    def micro_batch_tokens(self) -> int:
        return self._rounds.rank.reduced.micro_batch_tokens

    @property
    @override
    def replicas(self) -> int:
        return self._backend.replicas

    @property
    @override
    def shares_prefixes(self) -> bool:
        return self._backend.shares_prefixes

    @property
    @override
    def costs(self) -> Costs:
        return self._backend.costs

    @override
    def micro(self, work: Many[list[Rows]]) -> list[bool]:
        found: list[bool] = []
        while len(found) < len(work):
            some = work[len(found) : len(found) + self._together]
            for _ in some:
                failpoint_sync("trainer.micro")
            started, state = time.monotonic(), dict(self._algorithm_state)
            with self._reducing(divisible=any(map(_divisible, (rows for micro in some for rows in micro)))):
                found += self._rounds.lead(
                    [
                        messages.MicroRound([micro[replica] for micro in some], state, policy=self._policy)
                        for replica in range(self.replicas)
                    ]
                )
            self._rounds.micro_rounds += len(some)
            each_s = (time.monotonic() - started) / len(some)
            self._together = max(1, min(MOST_TOGETHER, int(TOGETHER_S / max(each_s, 1e-6))))
        return found

    def compute(self, work: Many[list[Rows]]) -> tuple[bool, dict[int, list[float]]]:
        """As `micro`; whether all were finite, and the log-probs of each sample's trained tokens, by its `id`."""
        finite, found = True, dict[int, list[float]]()
        for micro in work:
            state = dict(self._algorithm_state)
            with self._reducing(divisible=any(map(_divisible, micro))):
                [(fits, values)] = self._rounds.lead(
                    [messages.MicroRound([rows], state, tells=True, policy=self._policy) for rows in micro]
                )
            self._rounds.micro_rounds += 1
            finite = finite and fits
            for rows, own in zip(micro, values, strict=True):
                found.update(zip((id(each) for row in rows for each in row), own, strict=True))
        return finite, found

    @override
    def balance(self, works: Many[list[Rows]], denominator: float) -> None:
        for work in works:
            self._rounds.lead([messages.CountRound(rows, policy=self._policy) for rows in work])
        self._rounds.lead(messages.BalanceRound(denominator, policy=self._policy))

    @override
    def read(self, episodes: Many[EpisodeData], owners: Many[int]) -> list[EpisodeScores]:
        started = time.monotonic()
        light, replicas = [episode.without_pictures() for episode in episodes], range(self.replicas)
        own = [[place for place, owner in enumerate(owners) if owner == replica] for replica in replicas]
        given = [
            [
                pair[owner == replica]
                for pair, owner in zip(zip(light, episodes, strict=True), owners, strict=True)
            ]
            for replica in replicas
        ]
        rounds = [messages.ReadRound(data, places) for data, places in zip(given, own, strict=True)]
        found: list[EpisodeScores] = self._rounds.lead(rounds)
        self._rounds.infer_seconds += time.monotonic() - started
        return found

    @override
    def credit(self, data: CreditData) -> None:
        self._rounds.lead(messages.CreditRound(data))

    @override
    def chunks(self, work: Many[list[int]], lent: Many[LentPictures]) -> bool:
        with self._reducing(divisible=max(map(len, work)) > 1):
            finite: bool = self._rounds.lead(
                [messages.ChunksRound(own, pictures) for own, pictures in zip(work, lent, strict=True)]
            )
        return finite

    @override
    def end_episodes(self, *, learned: bool) -> None:
        self._rounds.lead(messages.EndEpisodesRound(learned))

    @override
    def holds(self) -> bool:
        if finite := bool(self._rounds.lead(messages.CheckRound(policy=self._policy))):
            return finite
        self.drop()
        return False

    @override
    def infer(self, groups: Many[list[Sample]], columns: Many[str]) -> list[list[Columns]]:
        started = time.monotonic()
        found: dict[int, Columns] = {}
        budget, shared = self.micro_batch_tokens, self.shares_prefixes
        plan = plan_rounds(groups, budget, replicas=self.replicas, shared=shared, costs=self.costs)
        for work, _ in plan:
            with self._reducing(divisible=any(map(_divisible, work))):
                results = self._rounds.lead(
                    [messages.InferRound(rows, list(columns), policy=self._policy) for rows in work]
                )
            for rows, values in zip(work, results, strict=True):
                own = [id(sequence) for row in rows for sequence in row]
                found.update(zip(own, values, strict=True))
        self._rounds.infer_seconds += time.monotonic() - started
        nothing: Columns = {name: [] for name in columns}
        return [[found.get(id(sequence), nothing) for sequence in group] for group in groups]

    @override
    def apply(self, denominator: float, rate: float, critic_rate: float) -> CommitReport:
        report: CommitReport = self._rounds.lead(
            messages.CommitRound(
                denominator,
                rate,
                critic_rate,
                self.optimizer.model_dump_json().encode() if self.optimizer is not None else b"",
                policy=self._policy,
            )
        )
        if report.differs:
            raise differing(self._rounds.attempt[0], report.differs)
        return report

    @override
    def drop(self) -> None:
        self._rounds.drop()


def _divisible(rows: Rows) -> bool:
    """Whether a smaller budget would divide a micro-batch: a sequence is computed whole."""
    return sum(map(len, rows)) > 1
