"""The rounds of a step as the leader's learner asks for them: see `StepRounds`. Knows no groups and no wire."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from headrace_servicekit.failpoints import failpoint_sync

from headrace_trainer.backends._base import CommitReport, PrivateGradient
from headrace_trainer.group.rank import Rank, commit_report, is_finite
from headrace_trainer.learning.episodes.data import CreditData, EpisodeData, EpisodeScores
from headrace_trainer.learning.packing.work import plan_rounds
from headrace_trainer.learning.samples import Columns, Rows, Sequence


class LeaderRounds:
    """`lead` announces a round and does the leader's part of it."""

    def __init__(self, lead: Callable[..., object], rank: Rank) -> None:
        self._lead = lead
        self._rank = rank
        self.attempt = (0, 0)
        """Step and attempt that are open, for whoever reads of a stuck round."""
        self.critic_rate = 0.0
        """Learning rate of the critic's own weights in the open step."""
        self.micro_rounds = 0
        """How many have run."""
        self.infer_seconds = 0.0
        """How long infer rounds have run."""

    @property
    def replicas(self) -> int:
        """See `StepRounds`."""
        return self._rank.backend.replicas

    @property
    def shares_prefixes(self) -> bool:
        """See `StepRounds`."""
        return self._rank.backend.shares_prefixes

    def micro(self, work: list[Rows]) -> bool:
        """See `StepRounds`."""
        failpoint_sync("trainer.micro")
        finite = is_finite(self._step("micro", work=work, algorithm_state=self._rank.algorithm.state()))
        self.micro_rounds += 1
        return finite

    def read(self, episodes: Many[EpisodeData]) -> list[EpisodeScores]:
        """See `StepRounds`."""
        started = time.monotonic()
        found = self._step("read", episodes=list(episodes))
        assert isinstance(found, list)
        self.infer_seconds += time.monotonic() - started
        return found

    def credit(self, data: CreditData) -> None:
        """See `StepRounds`."""
        self._step("credit", credit=data)

    def chunks(self, work: list[list[int]]) -> bool:
        """See `StepRounds`."""
        return is_finite(self._step("chunks", chunks=work))

    def end_episodes(self, *, learned: bool) -> None:
        """See `StepRounds`."""
        self._step("end_episodes", learned=learned)

    def holds(self) -> bool:
        """See `StepRounds`."""
        if is_finite(self._lead("check")):
            return True
        self.drop()
        return False

    def infer(self, groups: Many[list[Sequence]], columns: Many[str]) -> list[list[Columns]]:
        """See `StepRounds`."""
        started = time.monotonic()
        found: dict[int, Columns] = {}
        for work, _ in plan_rounds(groups, self._rank.config.trainer.micro_batch_tokens, self):
            results = self._lead("infer", work=work, columns=list(columns))
            assert isinstance(results, list)
            for rows, values in zip(work, results, strict=True):
                own = [id(sequence) for row in rows for sequence in row]
                found.update(zip(own, values, strict=True))
        self.infer_seconds += time.monotonic() - started
        nothing: Columns = {name: [] for name in columns}
        return [[found.get(id(sequence), nothing) for sequence in group] for group in groups]

    def apply(self, denominator: float, rate: float) -> CommitReport:
        """See `StepRounds`."""
        return commit_report(
            self._step("commit", denominator=denominator, learning_rate=rate, critic_rate=self.critic_rate)
        )

    def add(self, given: PrivateGradient) -> None:
        """Adds a helper's gradient to what the ranks have accumulated."""
        self._rank.contributed = given
        try:
            self._step("add")
        finally:
            self._rank.contributed = None

    def hold(self) -> None:
        """See `StepRounds`."""
        self._step("hold")

    def end_hold(self, *, back: bool) -> None:
        """See `StepRounds`."""
        self._step("end_hold", back=back)

    def drop(self) -> None:
        """See `StepRounds`."""
        self._lead("abort")

    def _step(self, kind: str, **fields: object) -> object:
        step, attempt = self.attempt
        return self._lead(kind, step=step, attempt=attempt, **fields)
