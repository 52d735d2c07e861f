"""A run on the leader of its trainer group: restored, learned from step by step, published, saved. One thread calls it.

`Session` alone changes the run's state. The rules of a step are `learning.step`'s, what ranks do is `Rounds`', and
checkpoints, versions and contributions are kept by the parts that this folder has for them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import torch
from headrace_servicekit.failpoints import failpoint_sync
from headrace_servicekit.weights.store import WeightStore

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, judge_of
from headrace_trainer.backends._base import PrivateGradient
from headrace_trainer.checkpoints.directory import CheckpointDirectory
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.checkpoints.tree import Origin
from headrace_trainer.errors import OutOfMemory, Quiesced, Refusal, invalid
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.figures import (
    agreement,
    differences,
    differing,
    rated,
    staleness_figures,
    witnesses,
)
from headrace_trainer.learning.policies import OWN, Learning, finish, learn_parts, part_of
from headrace_trainer.learning.samples import GroupRecord, LearnItem, Sample
from headrace_trainer.ranks.policy_rounds import PolicyRounds
from headrace_trainer.ranks.rounds import Rounds
from headrace_trainer.session.calls import Call, CallReply, compute
from headrace_trainer.session.copies import CARRIED, Carried, export_run, write_carried
from headrace_trainer.session.helping import (
    Contribution,
    Offer,
    Offers,
    add_records,
    check_gradient,
    check_may_help,
    contribution_of,
)
from headrace_trainer.session.saving import Restored, RunCheckpoints, Write, check_same_models
from headrace_trainer.versions.publishing import own_weights
from headrace_trainer.versions.versions import Published, RunVersions


class Session:
    """One run on the leader of one trainer group after another."""

    def __init__(self, run: str, run_directory: Path, rounds: Rounds, store: WeightStore) -> None:
        self.rounds = rounds
        self.checkpoints = RunCheckpoints(
            run_directory, rounds.rank.config, judges=bool(judge_of(rounds.rank.algorithms[OWN]))
        )
        self._state = steps.StepState()
        self._run, self._directory, self._store = run, run_directory, store
        self._versions: RunVersions | None = None
        self._policies: list[Learning] = []
        self._carried: Carried | None = None
        self._offers = Offers(store, run)
        self._helps = False
        self._learn_seconds = 0.0
        self._witnesses: list[Sample] = []
        self._rated: dict[tuple[int, int], Sample] = {}
        """Those whose tokens the commit says something of."""

    @property
    def state(self) -> steps.StepState:
        """The state of the run's steps; nothing is held once the trainer group has lost a rank."""
        return steps.lost(self._state) if self.rounds.lost else self._state

    def enter(self, rounds: Rounds) -> None:
        """Goes on as the leader of another trainer group, which holds nothing yet."""
        self._state = self.state
        self.rounds = rounds

    # Restoring

    def restore(
        self,
        checkpoint: str,
        number: int,
        store_id: str,
        source: CheckpointDirectory | None = None,
        *,
        weights_only: bool = False,
    ) -> Restored:
        """Loads a checkpoint, or the initial model when the name is empty, as version `number`.

        `weights_only`: the optimizer begins anew. `source` has the checkpoint when it is another run's: numbers of that
        run mean nothing in this one.
        """
        origin = Origin(checkpoint, source.run if source else "")
        if (reply := self.checkpoints.repeated(origin, number, self.state)) is not None:
            return reply
        steps.check_restore(self.state, number)
        self.checkpoints.check_place()
        if source and not checkpoint:
            raise invalid("checkpoint: name one of source_run_directory, as ListCheckpoints does")
        self.checkpoints.finish()
        rank = self.rounds.rank
        saved = (source or self.checkpoints.directory).open(checkpoint) if checkpoint else None
        started = time.monotonic()
        reader = None
        if saved is not None:
            reader = StateReader.of_checkpoint(saved.path, saved.files, saved.optimizer_steps)
        rank.check_files(reader)
        planned = rank.check_memory()
        before = self.state, self.checkpoints.manifest
        self._state, self.checkpoints.manifest = steps.lost(self.state), b""
        self._drop_carried()
        where = (self._below_runs(saved.path), saved.digest) if saved else ("", "")
        try:
            self.rounds.restore(checkpoint, number, reader, *where, weights_only=weights_only)
        except Quiesced:
            self._state, self.checkpoints.manifest = before
            raise
        except OutOfMemory as short:
            raise self._after(short, in_attempt=False) from short
        if saved is not None:
            check_same_models(saved, rank.backends.reference, rank.backends.base_model)
        rank.load_algorithm_state(saved.algorithm_state if saved else {})
        if reader is not None:
            torch.set_rng_state(reader.random_state())
        self._assemble()
        parent = saved.version.number if saved and not source else 0
        ordinal = saved.version.ordinal if saved else 0
        version = steps.Version(number, parent, ordinal, self._stage(number))
        self._state = steps.restored(self.state, version, saved.lineage if saved and not source else {})
        figures = {"restore_seconds": time.monotonic() - started, **planned.figures()}
        figures |= rank.restore_figures()
        reply = Restored(
            version, rank.warmup.steps, figures, rank.backends.layout_chosen, rank.backends.notes
        )
        self.checkpoints.begin(origin, store_id, reply)
        return reply

    @property
    def carried_number(self) -> int:
        """Number of the version that is carried to the next group; 0 for none."""
        return self._carried.version.number if self._carried else 0

    def carry(self) -> None:
        """Writes the recorded version and its optimizer state into the run's directory; only a restore goes on.

        Raises Refusal NOT_OPEN, NOT_RECORDED, CONFLICT inside a step, NOT_LEADER for a helper, or CARRY_FAILED.
        """
        if self._carried is None:
            self._check_leads("keeps nothing")
            self._carried = write_carried(self.state, self.rounds, self.checkpoints, self._below_runs)
            self._state = steps.lost(self.state)

    def take_up(self, number: int) -> Restored:
        """Shards what was carried over this group's ranks, as the version that it is. A retry gets the same.

        Raises Refusal NOT_CARRIED, and CARRIED_MISMATCH when the weights come out with another digest.
        """
        carried, held = self._carried, self.state.version
        if carried is None and held is not None and held.number == number:
            return Restored(held, 0, {}, self.rounds.rank.backends.layout_chosen)
        if carried is None or carried.version.number != number:
            raise Refusal("NOT_CARRIED", f"version {number} is not carried; restore a checkpoint")
        started = time.monotonic()
        planned = self.rounds.rank.check_memory()
        reader = carried.open()
        self.rounds.restore(
            CARRIED, number, reader, self._below_runs(carried.directory), carried.saved.digest
        )
        self.rounds.rank.load_algorithm_state(carried.saved.algorithm_state)
        torch.set_rng_state(reader.random_state())
        self._assemble()
        if (found := self._stage(number)) != carried.version.digest:
            self._drop_carried()
            raise carried.mismatch(found)
        self._state = carried.state
        self._drop_carried()
        figures = {"restore_seconds": time.monotonic() - started, **planned.figures()}
        return Restored(carried.version, 0, figures, self.rounds.rank.backends.layout_chosen)

    def _drop_carried(self) -> None:
        if self._carried is not None:
            self._carried.drop()
        self._carried = None

    def _below_runs(self, path: Path) -> str:
        """As the other ranks find it, whose directory of runs may be mounted elsewhere."""
        return str(path.relative_to(self._directory.parent))

    def _assemble(self) -> None:
        rank = self.rounds.rank
        if self._versions is None:
            self._versions = RunVersions(self._store, self._run, rank)
        self._policies = self._learning()

    def _learning(self) -> list[Learning]:
        """The run's policies as they learn; the run's own comes first."""
        found = []
        for name, kind in self.rounds.rank.kind.policies.items():
            algorithm, rounds = self.rounds.rank.algorithms[name], PolicyRounds(self.rounds, name)
            learner = kind.learner(algorithm, rounds)
            found.append(Learning(name, kind.config, algorithm, learner, rounds))
        return found

    def _check_leads(self, what: str) -> None:
        if self._helps:
            raise Refusal("NOT_LEADER", f"a helper {what}: send this to rank 0 of the trainer group")

    # A step

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
        started = time.monotonic()
        groups, refusals = steps.admit_each(self.state, items)
        if groups:
            learned, rounds, config = [*groups.values()], self.rounds.micro_rounds, self.rounds.rank.config
            alone = len(self._policies) == 1
            try:
                if alone:
                    self._state = self._policies[0].learner.learn(self.state, learned)
                else:
                    self._state = learn_parts(self._policies, config, self.state, learned)
            except Quiesced as quiesced:
                if self.rounds.micro_rounds == rounds:
                    raise
                # A part of these groups is in the accumulators, and it is not known which.
                lost = steps.attempt_lost(self.state, quiesced)
                self.abort(*self.rounds.attempt)
                raise lost from quiesced
            except OutOfMemory as short:
                raise self._after(short, in_attempt=True) from short
            own = (group if alone else part_of(group, OWN, config.played) for group in learned)
            self._witnesses = self._witnesses or witnesses(self.state, own)
            if alone:
                self._rated |= rated(learned)
        self._learn_seconds += time.monotonic() - started
        return [
            refusal or [self.state.groups[group.prompt_ordinal] for group in item.groups]
            for item, refusal in zip(items, refusals, strict=True)
        ]

    def _after(self, short: OutOfMemory, *, in_attempt: bool) -> Refusal:
        """What a round for which a device had no room means to who asked for it.

        Where less is tried next, either the attempt is over, or the trainer's state is and a restore goes on. Else the
        run ends: the same step would end alike.
        """
        key = "trainer.micro_batch_tokens"
        if not short.retries:
            return invalid(f"{key}: {short.message}; {self.rounds.rank.reduced.fixes()}", key=key)
        if short.group_lost or not in_attempt:
            return Refusal("OUT_OF_MEMORY", f"{short.message}; restore a checkpoint", "unavailable")
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
        started, rounds = time.monotonic(), self.rounds.micro_rounds
        try:
            self._state, reply = compute(self.state, self._policies[0], call)
        except Quiesced as quiesced:
            if self.rounds.micro_rounds == rounds:
                raise
            lost = steps.attempt_lost(self.state, quiesced)
            self.abort(*self.rounds.attempt)
            raise lost from quiesced
        except OutOfMemory as short:
            raise self._after(short, in_attempt=call.learns) from short
        self._learn_seconds += time.monotonic() - started
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
            raise self._after(short, in_attempt=False) from short
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

    # A version

    def record(self, step: int, attempt: int, number: int) -> None:
        """The commit is in the ledger."""
        self._state = steps.recorded(self.state, step, attempt, number)

    def _stage(self, number: int) -> str:
        """Casts the held weights as version `number`, unseen; their digest."""
        assert self._versions is not None
        return self._versions.stage(self.rounds, number)

    def publish(self, number: int) -> Published:
        """Makes the held and recorded version visible."""
        version = steps.check_recorded(self.state, number)
        assert self._versions is not None
        return self._versions.publish(self.rounds, version)

    def save(self, number: int, ledger: bytes, retained: Collection[str] = ()) -> tuple[Write, float]:
        """Begins to write the held and recorded version; with the seconds that training was stopped.

        A version that is being written, or is on disk, is not written again. Checkpoints named in `retained` are
        not deleted for it. Raises Refusal BUSY while another one is being written.
        """
        self._check_leads("saves nothing")
        if (write := self.checkpoints.written(number)) is not None:
            return write, 0.0
        version = steps.check_recorded(self.state, number)
        saved = version, self.state.lineage, ledger, retained
        return self.checkpoints.save(
            self.rounds.rank, *saved, lambda aside: self.rounds.snapshot(self._below_runs(aside))
        )

    def export(self, name: str) -> tuple[Path, steps.Version]:
        """Writes the held weights below the run's directory: a Hugging Face one, or a robot policy's.

        Adapters are in the weights, and beside them once more by themselves.
        """
        version = steps.held_version(self.state)
        return export_run(self.rounds, self._directory, name), version

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

    def close(self) -> None:
        """Finishes the checkpoint in flight and drops what the run published."""
        self.checkpoints.finish()
        self._drop_carried()
        if self._versions is not None:
            self._versions.close()
        self._offers.close()
        if self._helps:
            self._store.keep(self._run, set())  # the base that it was given
