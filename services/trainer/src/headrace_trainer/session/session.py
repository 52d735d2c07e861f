"""A run as its leader learns from it step by step, or helps another with a step. One thread calls it.

`Session` alone changes the run's state. The rules of a step are `learning.step`'s, what ranks do is `Rounds`', and
what is held between steps is `HeldRun`'s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headrace_servicekit.failpoints import failpoint_sync
from headrace_servicekit.weights.store import WeightStore
from typing_extensions import override

from headrace_trainer.algorithms._base import OLD_LOG_PROBS
from headrace_trainer.backends._base import PrivateGradient
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.errors import OutOfMemory, Quiesced, Refusal
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.figures import (
    agreement,
    differences,
    differing,
    rated,
    staleness_figures,
    witnesses,
)
from headrace_trainer.learning.policies import OWN, finish, learn_parts, part_of
from headrace_trainer.learning.samples import Group, GroupRecord, LearnItem, Sample
from headrace_trainer.ranks.rounds import Rounds
from headrace_trainer.session.calls import Call, CallReply, compute
from headrace_trainer.session.helping import (
    Contribution,
    Offer,
    Offers,
    add_records,
    check_gradient,
    check_may_help,
    contribution_of,
)
from headrace_trainer.session.holding import HeldRun
from headrace_trainer.versions.publishing import own_weights


class Session(HeldRun):
    """The steps of one run."""

    def __init__(self, run: str, run_directory: Path, rounds: Rounds, store: WeightStore) -> None:
        super().__init__(run, run_directory, rounds, store)
        self._offers = Offers(store, run)
        self._learn_seconds = 0.0
        self._witnesses: list[Sample] = []
        self._rated: dict[tuple[int, int], Sample] = {}
        """Those whose tokens the commit says something of."""

    def begin(self, command: steps.Begin) -> None:
        """Opens a step attempt with zeroed accumulators."""
        state, fresh = steps.begin(self.state, command)
        if fresh:
            self.rounds.attempt = command.step, command.attempt
            self._drop_accumulators()
            self._learn_seconds, self.rounds.infer_seconds, self._witnesses = 0.0, 0.0, []
            self._rated = {}
        self._state = state

    def learn(self, items: Many[LearnItem]) -> list[list[GroupRecord] | Refusal]:
        """Accumulates what has queued up; for each item what became of its groups, or why it is refused."""
        failpoint_sync("trainer.learn")
        with self._accumulating():
            groups, refusals = steps.admit_each(self.state, items)
            if groups:
                self._learn([*groups.values()])
        return [
            refusal or [self.state.groups[group.prompt_ordinal] for group in item.groups]
            for item, refusal in zip(items, refusals, strict=True)
        ]

    def _learn(self, groups: Many[Group]) -> None:
        own: Iterable[Group] = groups
        if len(self._policies) == 1:
            self._state = self._policies[0].learner.learn(self.state, groups)
            self._rated |= rated(groups)
        else:
            config = self.rounds.rank.config
            self._state = learn_parts(self._policies, config, self.state, groups)
            own = (part_of(group, OWN, config.played) for group in groups)
        self._witnesses = self._witnesses or witnesses(self.state, own)

    @contextmanager
    def _accumulating(self, *, learns: bool = True) -> Iterator[None]:
        """Counts the body's seconds. A lapsed lease, or a device without room, ends the attempt that the body `learns`
        in: a part of its groups is in the accumulators then, and it is not known which.
        """
        started, rounds = time.monotonic(), self.rounds.micro_rounds
        try:
            yield
        except Quiesced as quiesced:
            if self.rounds.micro_rounds == rounds:
                raise
            lost = steps.attempt_lost(self.state, quiesced)
            self.abort(*self.rounds.attempt)
            raise lost from quiesced
        except OutOfMemory as short:
            raise (self._after(short) if learns else self._no_memory(short)) from short
        self._learn_seconds += time.monotonic() - started

    def _after(self, short: OutOfMemory) -> Refusal:
        """As `_no_memory`, of a round of the open attempt: where less is tried next, the attempt is over."""
        if not short.retries or short.group_lost:
            return self._no_memory(short)
        told = self.rounds.rank.reduced.told
        if told is not None:
            self.rounds.rank.reduce(told[0], recomputes=told[1])
        step, attempt = self.rounds.attempt
        self.abort(step, attempt)
        return Refusal(
            "ATTEMPT_LOST", f"{short.message}: step {step} attempt {attempt} is over, begin the next attempt"
        )

    def infer(self, sequences: list[Sample], column: str = OLD_LOG_PROBS) -> list[list[float]]:
        """A column of the trained tokens, by default log-probs under the current weights, for each sequence."""
        steps.held_version(self.state)
        [found] = self._policies[0].rounds.infer([sequences], [column])
        return [own[column] for own in found]

    def compute(self, call: Call) -> CallReply:
        """Log-probs and loss of a call; if it learns, its gradient is in the open attempt, or the attempt is over."""
        with self._accumulating(learns=call.learns):
            self._state, reply = compute(self.state, self._policies[0], call)
        return reply

    def abort(self, step: int, attempt: int) -> None:
        """Drops the accumulators of an attempt."""
        before = self.state
        self._state = steps.aborted(before, step, attempt)
        if before.phase is steps.Phase.ACCUMULATING and self.state.phase is steps.Phase.IDLE:
            self._drop_accumulators()

    def commit(self, command: steps.Commit, manifest: bytes) -> steps.CommitReply:
        """Applies the step, or says why not; the same key gets the same reply.

        `manifest` is the coordinator's, opaque, kept for the next checkpoint.
        """
        self._check_leads("commits nothing")
        if reply := steps.retried(self.state, command):
            return reply
        if (result := steps.check_commit(self.state, command)) is not None:
            return self._refuse(command, result)
        try:
            reply = self._apply(command)
        except Quiesced:
            raise  # Before the optimizer, on all ranks: the same command may come again.
        except OutOfMemory as short:
            self._state = steps.lost(self.state)
            raise self._no_memory(short) from short
        except BaseException:
            # Between the optimizer's start and the reply the weights are undefined: only a restore goes on.
            self._state = steps.lost(self.state)
            raise
        if reply.version is not None:
            self._state = steps.committed(self.state, command, reply)
            self.checkpoints.manifest = manifest
        return reply

    def _apply(self, command: steps.Commit) -> steps.CommitReply:
        config, started = self.rounds.rank.config, time.monotonic()
        records, counts = self.state.accumulated, steps.totals(self.state)
        if command.optimizer is not None:
            self._policies[0].optimizer = self._policies[0].rounds.optimizer = command.optimizer
        compared = self._compared(records)
        failpoint_sync("trainer.commit.before_optimizer")
        finished, figures = finish(self._policies, self.rounds, self.state)
        if not finished.finite:
            return self._refuse(command, steps.Result.NONFINITE, finished.suspects)
        failpoint_sync("trainer.commit.after_optimizer")
        ordinal, digest = steps.held_version(self.state).ordinal + 1, self._stage(command.next_number)
        version = steps.Version(command.next_number, command.base_number, ordinal, digest)
        figures |= {"learn_seconds": self._learn_seconds + time.monotonic() - started}
        figures |= staleness_figures(self.state) if config.algorithm.max_staleness else {}
        figures |= {"infer_seconds": self.rounds.infer_seconds} if self._policies[0].algorithm.columns else {}
        found = self.infer([*self._rated.values()]) if self._rated else []
        made = dict(zip(self._rated, found, strict=True))
        self._rated = {}
        return replace(counts, version=version, figures={**figures, **compared}, rated=made)

    def _compared(self, records: Many[GroupRecord]) -> dict[str, float]:
        """Figures of a comparison with the engine for a step whose micro-batches made none: none had a gradient."""
        every = any(policy.algorithm.every_token for policy in self._policies)
        if not self._witnesses or any(r.tokens and (every or not r.all_equal) for r in records):
            return {}
        found = self.infer(self._witnesses)
        if self.rounds.rank.config.deterministic and (off := sorted(differences(self._witnesses, found))):
            raise differing(self.rounds.attempt[0], str(off[0]))
        return agreement(self._witnesses, found)

    def _refuse(
        self, command: steps.Commit, result: steps.Result, suspects: Mapping[str, str] | None = None
    ) -> steps.CommitReply:
        reply = steps.CommitReply(result)
        self._drop_accumulators()
        self._state = steps.refused(self.state, command, reply, suspects)
        return reply

    def _drop_accumulators(self) -> None:
        self.rounds.drop()
        for policy in self._policies:
            policy.reset()

    # Helping

    def check_help(self, base: steps.Version) -> None:
        """Raises what `help` would, but for another model: before weights are taken for it."""
        leads = not self._helps and (self.state.version is not None or self._carried is not None)
        check_may_help(self.rounds.rank, self.state.version, base, leads=leads)

    def help(self, base: steps.Version, reader: StateReader) -> None:
        """Holds a published version as a helper: without optimizer state, checkpoints or versions of its own.

        Raises Refusal CONFLICT for the leader of a run's steps, and INVALID for an older version or another model.
        """
        self.check_help(base)
        if self.state.version == base:
            return
        rank = self.rounds.rank
        reader = own_weights(reader, rank.config.model)
        self._state, self._helps = steps.lost(self.state), True
        self.rounds.help(reader)
        self._policies = self._learning()
        self._state = steps.restored(self.state, base, {})

    def contribute(self, step: int, attempt: int) -> Offer:
        """Ends a helper's attempt; what it has accumulated, published. A retry gets the same.

        Raises Refusal NOT_OPEN, EMPTY_STEP, or NONFINITE for what may not be added to a step.
        """
        if (last := self._offers.given(step, attempt)) is not None:
            return last
        what = contribution_of(self.state, step, attempt, helps=self._helps)
        gradient = self.rounds.rank.helping.private_gradient()
        if self.state.tainted or not gradient.is_finite():
            self.abort(step, attempt)
            raise Refusal("NONFINITE", self.state.tainted or "the accumulated gradient is not finite")
        offer = self._offers.publish(what, gradient)
        self.abort(step, attempt)
        return offer

    def add(self, given: Contribution, gradient: PrivateGradient) -> None:
        """Adds a helper's gradient to the open step, whole or not at all; one that is in already changes nothing."""
        state, fresh = add_records(self.state, given)
        if not fresh:
            return
        check_gradient(given, gradient, self.rounds.rank.helping.gradient_shapes())
        self.rounds.add(gradient)
        self._state = state

    @override
    def close(self) -> None:
        super().close()
        self._offers.close()
        if self._helps:
            self._store.keep(self._run, set())  # the base that it was given
