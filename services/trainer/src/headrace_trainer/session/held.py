"""What the leader of a trainer group holds of a run: the state of its steps, the rounds, and the weight store.

Decides nothing of a step, and knows no checkpoint but the one being written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace_servicekit.weights import WeightStore
from torch import Tensor

from headrace_trainer.checkpoints.directory import CheckpointDirectory
from headrace_trainer.checkpoints.saver import Saver
from headrace_trainer.errors import Refusal
from headrace_trainer.group.leader import LeaderRounds
from headrace_trainer.group.rank import Rank
from headrace_trainer.group.rounds import RoundLost, Rounds
from headrace_trainer.kinds import AnyLearner, run_learner
from headrace_trainer.learning import step as steps
from headrace_trainer.session.carrying import Carried
from headrace_trainer.session.publishing import Publisher


class HeldRun:
    """Leads the rounds of one run; the rest of a session builds on it."""

    def __init__(self, run: str, run_directory: Path, rank: Rank, rounds: Rounds, store: WeightStore) -> None:
        self.state = steps.StepState()
        self.checkpoints = CheckpointDirectory(run_directory)
        self.saver: Saver | None = None
        self.trainer_group_lost = False
        self._run = run
        self._directory = run_directory
        self._rank = rank
        self._rounds = rounds
        self._store = store
        self._publisher: Publisher | None = None
        self._learner: AnyLearner | None = None
        self._leader = LeaderRounds(self._lead, rank)
        self._helps = False
        self._carried: Carried | None = None

    def enter(self, rank: Rank, rounds: Rounds) -> None:
        """Goes on as the leader of another trainer group, which holds nothing yet."""
        self._rank, self._rounds, self.trainer_group_lost = rank, rounds, False
        self._leader = LeaderRounds(self._lead, rank)

    def abort(self, step: int, attempt: int) -> None:
        """Drops the accumulators of an attempt."""
        before = self.state
        self.state = steps.aborted(self.state, step, attempt)
        if before.phase is steps.Phase.ACCUMULATING and self.state.phase is steps.Phase.IDLE:
            self._drop_accumulators()

    def _assemble(self) -> None:
        if self._publisher is None:
            self._publisher = Publisher(self._store, self._run, self._rank.backend.weight_layout())
        self._learner = run_learner(self._rank.config, self._rank.algorithm, self._leader)

    def _stage(self, number: int) -> str:
        digest = ""

        def collect(weights: Iterator[tuple[str, Tensor]]) -> None:
            nonlocal digest
            assert self._publisher is not None
            digest = self._publisher.stage(number, weights)

        self._gather(collect)
        return digest

    def _gather(self, collect: object) -> None:
        self._rank.collect = collect  # type: ignore[assignment]
        try:
            self._lead("publish")
        finally:
            self._rank.collect = None

    def _drop_accumulators(self) -> None:
        self._leader.drop()
        if self._learner is not None:
            self._learner.reset()

    def _lead(self, kind: str, **fields: object) -> object:
        try:
            return self._rounds.lead(kind, **fields)  # type: ignore[arg-type]
        except RoundLost as error:
            self.state, self.trainer_group_lost = steps.lost(self.state), True
            raise Refusal(
                "TRAINER_GROUP_LOST",
                f"{error}; form the trainer group anew and restore a checkpoint",
                "unavailable",
            ) from error
