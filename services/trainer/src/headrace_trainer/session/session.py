"""What the leader does with a run in a step: begin, learn, commit, record, publish. One thread calls it.

Joins the step's rules and the rounds, which know nothing of each other. `held` has what it holds, `durable` how that
comes and stays, `helper` what a helper does instead of committing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path

from headrace_servicekit.failpoints import failpoint_sync
from headrace_servicekit.rpc.digests import set_digest
from headrace_servicekit.weights import StoredWeights, WeightStore

from headrace_trainer.algorithms._base import OLD_LOG_PROBS
from headrace_trainer.errors import Quiesced, Refusal, conflict
from headrace_trainer.group.rank import Rank
from headrace_trainer.group.rounds import Rounds
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.agreement import agreement, witnesses
from headrace_trainer.learning.figures import step_figures
from headrace_trainer.learning.samples import Disposition, Group, GroupRecord, Sequence
from headrace_trainer.learning.schedules import step_rates
from headrace_trainer.session.durable import DurableRun
from headrace_trainer.session.helper import HelperRun


@dataclass(frozen=True)
class LearnItem:
    """One message of a Learn stream. `authority` raises Refusal when its lease is not held any more."""

    step: int
    attempt: int
    groups: list[Group]
    authority: Callable[[], None] = lambda: None


class Session(DurableRun, HelperRun):
    """One run on the leader of one trainer group."""

    def __init__(self, run: str, run_directory: Path, rank: Rank, rounds: Rounds, store: WeightStore) -> None:
        super().__init__(run, run_directory, rank, rounds, store)
        self._learn_seconds = 0.0
        self._witnesses: list[Sequence] = []

    def begin(self, command: steps.Begin) -> None:
        """Opens a step attempt with zeroed accumulators."""
        state, fresh = steps.begin(self.state, command)
        if fresh:
            self._leader.attempt = command.step, command.attempt
            self._drop_accumulators()
            self._learn_seconds, self._leader.infer_seconds, self._witnesses = 0.0, 0.0, []
        self.state = state

    def learn(self, items: Many[LearnItem]) -> list[list[GroupRecord] | Refusal]:
        """Accumulates what has queued up; for each item what became of its groups, or why it is refused."""
        failpoint_sync("trainer.learn")
        started = time.monotonic()
        groups: dict[int, Group] = {}
        refusals: dict[int, Refusal] = {}
        for index, item in enumerate(items):
            try:
                self._admit(item, groups)
            except Refusal as refusal:
                refusals[index] = refusal
        if groups:
            self._accumulate(list(groups.values()))
            self._keep_witnesses(groups)
        self._learn_seconds += time.monotonic() - started
        return [
            refusals[index]
            if index in refusals
            else [self.state.groups[group.prompt_ordinal] for group in item.groups]
            for index, item in enumerate(items)
        ]

    def _accumulate(self, groups: list[Group]) -> None:
        assert self._learner is not None
        rounds = self._leader.micro_rounds
        try:
            self.state = self._learner.learn(self.state, groups)
        except Quiesced as quiesced:
            begun = self.state.begun
            if self._leader.micro_rounds == rounds or begun is None:
                raise
            # A part of these groups is in the accumulators, and nobody could tell which.
            self.abort(begun.step, begun.attempt)
            raise Refusal(
                "ATTEMPT_LOST",
                f"{quiesced.message}; a part of these groups was accumulated before, so step {begun.step} attempt "
                f"{begun.attempt} is over: begin the next attempt",
            ) from quiesced

    def _admit(self, item: LearnItem, groups: dict[int, Group]) -> None:
        """Adds an item's groups, all or none. Raises Refusal NOT_OPEN or CONFLICT, and the lease's reasons."""
        item.authority()
        steps.check_open(self.state, item.step, item.attempt)
        for group in item.groups:
            other = groups.get(group.prompt_ordinal)
            if other is not None and other.digest != group.digest:
                raise conflict(f"prompt {group.prompt_ordinal} came twice with other members or bodies")
            steps.known(self.state, group)
        groups.update((group.prompt_ordinal, group) for group in item.groups)

    def commit(self, command: steps.Commit, manifest: bytes) -> steps.CommitReply:
        """Applies the step, or says why not; the same key gets the same reply.

        `manifest` is the coordinator's, opaque, kept for the next checkpoint.
        """
        if self._helps:
            raise Refusal("NOT_LEADER", "a helper commits nothing: send this to rank 0 of the trainer group")
        if reply := steps.retried(self.state, command):
            return reply
        steps.check_commit(self.state, command)
        records = self.state.accumulated
        if set_digest(key for record in records for key in record.keys) != command.set_digest:
            return self._refuse(command, steps.Result.SET_MISMATCH)
        if self.state.tainted:
            return self._refuse(command, steps.Result.NONFINITE)
        try:
            reply = self._apply(command)
        except Quiesced:
            raise  # Before the optimizer, on all ranks: the same command may come again.
        except BaseException:
            # Between the optimizer's start and the reply the weights are undefined: only a restore goes on.
            self.state = steps.lost(self.state)
            raise
        if reply.version is not None:
            self.state, self._manifest = steps.committed(self.state, command, reply), manifest
        return reply

    def record(self, step: int, attempt: int, number: int) -> None:
        """The commit is in the ledger."""
        self.state = steps.recorded(self.state, step, attempt, number)

    def publish(self, number: int) -> tuple[StoredWeights, float]:
        """Makes the held and recorded version visible; with the seconds that its cast took at the commit."""
        version = steps.check_recorded(self.state, number)
        assert self._publisher is not None
        return self._publisher.publish(version), self._publisher.stage_seconds

    def infer(self, sequences: list[Sequence], column: str = OLD_LOG_PROBS) -> list[list[float]]:
        """A column of the trained tokens, by default log-probs under the current weights, for each sequence."""
        steps.held_version(self.state)
        [found] = self._leader.infer([sequences], [column])
        return [own[column] for own in found]

    def _apply(self, command: steps.Commit) -> steps.CommitReply:
        config = self._rank.config
        started = time.monotonic()
        records = self.state.accumulated
        counts = steps.totals(self.state)
        critic = self._rank.algorithm.critic
        rate, self._leader.critic_rate = step_rates(config.optimizer, critic, command.step, config.steps)
        compared = self._compared(records)
        failpoint_sync("trainer.commit.before_optimizer")
        assert self._learner is not None
        finished = self._learner.finish(self.state, rate)
        if not finished.finite:
            return self._refuse(command, steps.Result.NONFINITE, finished.suspects)
        failpoint_sync("trainer.commit.after_optimizer")
        ordinal = steps.held_version(self.state).ordinal + 1
        digest = self._stage(command.next_number)
        version = steps.Version(command.next_number, command.base_number, ordinal, digest)
        seconds = self._learn_seconds + time.monotonic() - started
        figures = step_figures(finished.steps, records, rate=rate, seconds=seconds)
        if self._rank.algorithm.columns:
            figures["infer_seconds"] = self._leader.infer_seconds
        figures |= {
            name: value for name, value in self._rank.algorithm.state().items() if name == "kl_coefficient"
        }
        self._rank.algorithm.observe(figures, counts.sequences)
        return replace(counts, version=version, figures={**figures, **compared})

    def _keep_witnesses(self, groups: dict[int, Group]) -> None:
        version = steps.held_version(self.state).number
        for prompt, group in groups.items():
            if not self._witnesses and self.state.groups[prompt].disposition is Disposition.ACCUMULATED:
                self._witnesses = witnesses(group, version)

    def _compared(self, records: Many[GroupRecord]) -> dict[str, float]:
        """Figures of a comparison with the engine for a step whose micro-batches made none: none had a gradient."""
        every = self._rank.algorithm.every_token
        if not self._witnesses or any(r.tokens and (every or not r.all_equal) for r in records):
            return {}
        return agreement(self._witnesses, self.infer(self._witnesses))

    def _refuse(
        self, command: steps.Commit, result: steps.Result, suspects: Mapping[str, str] | None = None
    ) -> steps.CommitReply:
        reply = steps.CommitReply(result)
        self._drop_accumulators()
        self.state = steps.refused(self.state, command, reply, suspects)
        return reply

    def close(self) -> None:
        """Finishes the checkpoint in flight and drops what the run published."""
        if self.saver is not None:
            self.saver.finish()
        for publisher in (self._publisher, self._gradients):
            if publisher is not None:
                publisher.close()
        if self._helps:
            self._store.keep(self._run, set())  # the base that it was given
