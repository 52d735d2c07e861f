"""What the leader does with a run: restore, learn, commit, record, publish, save. One thread calls it.

Joins the step's rules, the rounds and the checkpoints; each of those knows nothing of the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from headrace_servicekit.failpoints import failpoint_sync
from headrace_servicekit.rpc.digests import set_digest
from headrace_servicekit.weights import StoredWeights, WeightStore
from torch import Tensor

from headrace_trainer.algorithms._base import OLD_LOG_PROBS
from headrace_trainer.allocator import resident_bytes
from headrace_trainer.backends._base import PrivateGradient, StateReader
from headrace_trainer.checkpoints.directory import CheckpointDirectory, Snapshot
from headrace_trainer.checkpoints.reader import CheckpointReader
from headrace_trainer.checkpoints.saver import Saver, Write
from headrace_trainer.checkpoints.tree import Origin, Saved
from headrace_trainer.errors import Quiesced, Refusal, conflict, invalid
from headrace_trainer.group.leader import LeaderRounds
from headrace_trainer.group.rank import Copies, Rank
from headrace_trainer.group.rounds import RoundLost, Rounds
from headrace_trainer.kinds import AnyLearner, export_model, run_learner
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.agreement import agreement, witnesses
from headrace_trainer.learning.contribution import Contribution, add_records, check_helped
from headrace_trainer.learning.figures import step_figures
from headrace_trainer.learning.learner import Learner
from headrace_trainer.learning.samples import Disposition, Group, GroupRecord, Sequence
from headrace_trainer.learning.schedules import step_rates
from headrace_trainer.session.carrying import CARRIED, Carried, check_carried
from headrace_trainer.session.published import check_shapes
from headrace_trainer.session.publishing import Publisher

_EXPORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Restored:
    """What Restore answers."""

    version: steps.Version
    warmup_steps: int
    figures: dict[str, float]


@dataclass(frozen=True)
class LearnItem:
    """One message of a Learn stream. `authority` raises Refusal when its lease is not held any more."""

    step: int
    attempt: int
    groups: list[Group]
    authority: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Offer:
    """A helper's contribution, published in its weight store under `name` and the attempt's next number."""

    what: Contribution
    name: str
    gradient: StoredWeights
    token_sums: Mapping[str, float]
    token_maxima: Mapping[str, float]


class Session:
    """One run on the leader of one gang."""

    def __init__(self, run: str, run_directory: Path, rank: Rank, rounds: Rounds, store: WeightStore) -> None:
        self.state = steps.StepState()
        self.checkpoints = CheckpointDirectory(run_directory)
        self.saver: Saver | None = None
        self.gang_lost = False
        self._run = run
        self._directory = run_directory
        self._rank = rank
        self._rounds = rounds
        self._store = store
        self._publisher: Publisher | None = None
        self._learner: AnyLearner | None = None
        self._leader = LeaderRounds(self._lead, rank)
        self._last_restore: tuple[Origin, Restored] | None = None
        self._store_id = ""
        self._origin = Origin()
        self._manifest = b""
        self._learn_seconds = 0.0
        self._witnesses: list[Sequence] = []
        self._helps = False
        self._gradients: Publisher | None = None
        self._contributed: Offer | None = None
        self._carried: Carried | None = None

    # From one trainer group to the next

    @property
    def carried_number(self) -> int:
        """Number of the version that is carried to the next group; 0 for none."""
        return self._carried.version.number if self._carried else 0

    def carry(self) -> None:
        """Gathers the recorded version and its optimizer state into host memory; only `take_up` or `restore` goes on.

        Raises Refusal NOT_OPEN, NOT_RECORDED, CONFLICT inside a step, or NOT_LEADER for a helper.
        """
        if self._carried is not None:
            return
        if self._helps:
            raise Refusal("NOT_LEADER", "a helper keeps nothing: send this to rank 0 of the trainer group")
        check_carried(self.state)
        copies = self._lead("snapshot")
        assert isinstance(copies, Copies)
        self._carried = Carried(self.state, copies, dict(self._rank.algorithm.state()))
        self.state = steps.lost(self.state)

    def enter(self, rank: Rank, rounds: Rounds) -> None:
        """Goes on as the leader of another trainer group, which holds nothing yet."""
        self._rank, self._rounds, self.gang_lost = rank, rounds, False
        self._leader = LeaderRounds(self._lead, rank)

    def take_up(self, number: int) -> Restored:
        """Shards what was carried over this group's ranks, as the version that it is. A retry gets the same.

        Raises Refusal NOT_CARRIED, and CARRIED_MISMATCH when the weights come out with another digest.
        """
        carried = self._carried
        if carried is None or carried.version.number != number:
            if carried is None and self.state.version is not None and self.state.version.number == number:
                return Restored(self.state.version, 0, {})
            raise Refusal("NOT_CARRIED", f"version {number} is not carried; restore a checkpoint")
        started = time.monotonic()
        planned = self._rank.check_memory()
        self._rank.reader = carried.reader
        self._lead("restore", checkpoint=CARRIED)
        self._rank.algorithm.load_state(carried.algorithm_state)
        torch.set_rng_state(carried.reader.random_state())
        self._assemble()
        if (found := self._stage(number)) != carried.version.digest:
            self._carried = None
            raise Refusal(
                "CARRIED_MISMATCH",
                f"version {number} has the digest {found} in the new trainer group and had "
                f"{carried.version.digest}; restore a checkpoint",
            )
        self.state, self._carried = carried.state, None
        figures = {"restore_seconds": time.monotonic() - started, **planned.figures()}
        return Restored(carried.version, 0, figures)

    # Life of a version

    def restore(
        self, checkpoint: str, number: int, store_id: str, source: CheckpointDirectory | None = None
    ) -> Restored:
        """Loads a checkpoint, or the initial model when the name is empty, as version `number`.

        `source` has the checkpoint when it is another run's: numbers of that run mean nothing in this one.
        """
        origin = Origin(checkpoint, source.run if source else "")
        if (reply := self._restored_before(origin, number)) is not None:
            return reply
        steps.check_restore(self.state, number)
        if source and not checkpoint:
            raise invalid("checkpoint: name one of source_run_directory, as ListCheckpoints does")
        if self.saver is not None:
            self.saver.finish()
        saved = (source or self.checkpoints).open(checkpoint) if checkpoint else None
        started = time.monotonic()
        reader = CheckpointReader(saved.path, saved.optimizer_steps) if saved else None
        if reader is not None:
            self._rank.check_state(reader)
        planned = self._rank.check_memory()
        before = self.state, self._manifest
        self.state, self._manifest = steps.lost(self.state), b""
        self._rank.reader, self._carried = reader, None
        try:
            self._lead("restore", checkpoint=checkpoint)
        except Quiesced:
            self.state, self._manifest = before
            raise
        self._check_reference(saved)
        self._rank.algorithm.load_state(saved.algorithm_state if saved else {})
        if reader is not None:
            torch.set_rng_state(reader.random_state())
        self._assemble()
        parent = saved.version.number if saved and not source else 0
        ordinal = saved.version.ordinal if saved else 0
        version = steps.Version(number, parent, ordinal, self._stage(number))
        self.state = steps.restored(self.state, version, saved.lineage if saved and not source else {})
        self._store_id, self._origin, self.saver = store_id, origin, None
        self.checkpoints.sweep()
        figures = {
            "restore_seconds": time.monotonic() - started,
            "resident_bytes": float(resident_bytes()),
            "shared_prefix": float(self._rank.backend.shares_prefixes),
            **planned.figures(),
            **self._rank.warmup.figures,
        }
        if self._rank.backend.reference is not None:
            figures["reference_bytes"] = float(self._rank.backend.reference_bytes)
        reply = Restored(version, self._rank.warmup.steps, figures)
        self._last_restore = (origin, reply)
        self._claim_lineage()
        return reply

    def _check_reference(self, saved: Saved | None) -> None:
        """Raises Refusal CHECKPOINT_MISMATCH when the checkpoint's run was compared with another reference."""
        found = self._rank.backend.reference
        if (
            saved is None
            or saved.reference is None
            or found is None
            or found.digest == saved.reference.digest
        ):
            return
        raise Refusal(
            "CHECKPOINT_MISMATCH",
            f"trainer.reference: {saved.name} was made with the reference {saved.reference.name} (digest "
            f"{saved.reference.digest}), and this run has {found.name} (digest {found.digest}); give the same "
            "reference, or begin a run without from_checkpoint",
            key="trainer.reference",
        )

    def help(self, base: steps.Version, reader: StateReader) -> None:
        """Holds a published version as a helper: without optimizer state, checkpoints or versions of its own.

        Raises Refusal CONFLICT for the leader of a run's steps, and INVALID for an older version or another model.
        """
        self.check_help(base)
        if self.state.version == base:
            return
        check_shapes(reader, self._rank.config.model)
        self._rank.reader = reader
        self.state, self._helps = steps.lost(self.state), True
        self._lead("help")
        self._learner = Learner(self._rank.config, self._rank.algorithm, self._leader)
        self.state = steps.restored(self.state, base, {})

    def check_help(self, base: steps.Version) -> None:
        """Raises what `help` would, but for another model: before weights are taken for it."""
        check_helped(self._rank.algorithm)
        leads = self.state.version is not None or self._carried is not None
        if self._rank.gang.world_size > 1 or (leads and not self._helps):
            raise conflict(
                "this trainer leads the run's steps; a helper is a group of its own and restores nothing"
            )
        held = self.state.version
        if held is not None and held != base and base.number <= held.number:
            raise invalid(
                f"version {base.number} is not above {held.number}, which is held; numbers only rise"
            )

    def contribute(self, step: int, attempt: int) -> Offer:
        """Ends a helper's attempt; what it has accumulated, published. A retry gets the same.

        Raises Refusal NOT_OPEN, EMPTY_STEP, or NONFINITE for what nobody may add to a step.
        """
        last = self._contributed
        if last is not None and (last.what.step, last.what.attempt) == (step, attempt):
            return last
        begun, base = steps.check_open(self.state, step, attempt), steps.held_version(self.state)
        if not self._helps:
            raise Refusal("NOT_OPEN", "this trainer is no helper: call Help first")
        if not (records := self.state.accumulated):
            raise Refusal("EMPTY_STEP", "no group is accumulated")
        gradient = self._rank.helping.private_gradient()
        if self.state.tainted or not gradient.is_finite():
            self.abort(step, attempt)
            raise Refusal("NONFINITE", self.state.tainted or "the accumulated gradient is not finite")
        what = Contribution(step, attempt, base, begun.next_number, "", tuple(records))
        stored = self._offer(gradient, replace(base, number=begun.next_number))
        self._contributed = Offer(
            what, self._gradient_name, stored, gradient.token_sums, gradient.token_maxima
        )
        self.abort(step, attempt)
        return self._contributed

    def _offer(self, gradient: PrivateGradient, version: steps.Version) -> StoredWeights:
        if self._gradients is None:
            layout = [(name, "float32", tuple(tensor.shape)) for name, tensor in gradient.tensors.items()]
            self._gradients = Publisher(self._store, self._gradient_name, layout, kept=1)
        self._gradients.stage(version.number, iter(gradient.tensors.items()))
        return self._gradients.publish(version)

    @property
    def _gradient_name(self) -> str:
        return f"{self._run}/helpers/{self._store.incarnation}"

    def add(self, given: Contribution, gradient: PrivateGradient) -> None:
        """Adds a helper's gradient to the open step, whole or not at all; one that is in already changes nothing."""
        state, fresh = add_records(self.state, given)
        if not fresh:
            return
        if problem := gradient.difference(self._rank.helping.gradient_shapes()):
            raise invalid(f"the contribution of {given.helper} is of another model: {problem}")
        if not gradient.is_finite():
            raise Refusal("NONFINITE", f"the contribution of {given.helper} is not finite")
        self._leader.add(gradient)
        self.state = state

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

    def abort(self, step: int, attempt: int) -> None:
        """Drops the accumulators of an attempt."""
        before = self.state
        self.state = steps.aborted(self.state, step, attempt)
        if before.phase is steps.Phase.ACCUMULATING and self.state.phase is steps.Phase.IDLE:
            self._drop_accumulators()

    def publish(self, number: int) -> tuple[StoredWeights, float]:
        """Makes the held and recorded version visible; with the seconds that its cast took at the commit."""
        version = steps.check_recorded(self.state, number)
        assert self._publisher is not None
        return self._publisher.publish(version), self._publisher.stage_seconds

    # Figures of given sequences

    def infer(self, sequences: list[Sequence], column: str = OLD_LOG_PROBS) -> list[list[float]]:
        """A column of the trained tokens, by default log-probs under the current weights, for each sequence."""
        steps.held_version(self.state)
        [found] = self._leader.infer([sequences], [column])
        return [own[column] for own in found]

    # Durability

    def save(self, number: int, ledger: bytes, retained: Collection[str] = ()) -> tuple[Write, float]:
        """Begins to write the held and recorded version; with the seconds that training stood still.

        A version that is being written, or is on disk, is not written again. Checkpoints named in `retained` are
        not deleted for it. Raises Refusal BUSY while
        another one is being written.
        """
        if self._helps:
            raise Refusal("NOT_LEADER", "a helper saves nothing: send this to rank 0 of the trainer group")
        if self.saver is not None and (write := self.saver.written(number)) is not None:
            return write, 0.0
        version = steps.check_recorded(self.state, number)
        saver = self.saver or self._claim_lineage(required=True)
        assert saver is not None
        saver.check_idle()
        started = time.monotonic()
        snapshot = self._snapshot(version, ledger)
        return saver.start(snapshot, retained), time.monotonic() - started

    @property
    def last_failure(self) -> str:
        """Name of the last checkpoint whose write failed, with the reason."""
        return self.saver.last_failure if self.saver else ""

    def _snapshot(self, version: steps.Version, ledger: bytes) -> Snapshot:
        copies = self._lead("snapshot")
        assert isinstance(copies, Copies)
        return Snapshot(
            version=version,
            weights=copies.weights,
            optimizer=copies.optimizer,
            optimizer_steps=copies.optimizer_steps,
            lineage=self.state.lineage,
            store_id=self._store_id,
            ledger=ledger,
            step_manifest=self._manifest,
            origin=self._origin,
            reference=self._rank.backend.reference,
            algorithm_state=self._rank.algorithm.state(),
        )

    def export(self, name: str) -> tuple[Path, steps.Version]:
        """Writes the held weights below the run's directory: a Hugging Face one, or a robot policy's."""
        version = steps.held_version(self.state)
        if not _EXPORT_NAME.fullmatch(name) or name == "checkpoints":
            raise invalid(
                f"name {name[:100]!r}: give a directory's name of letters, digits, '.', '_' and '-' that begins with a "
                "letter or digit and is not 'checkpoints'"
            )
        target = self._directory / name
        weights: dict[str, Tensor] = {}
        self._gather(weights.update)
        export_model(self._rank.config, weights, target)
        return target, version

    def close(self) -> None:
        """Finishes the checkpoint in flight and drops what the run published."""
        if self.saver is not None:
            self.saver.finish()
        for publisher in (self._publisher, self._gradients):
            if publisher is not None:
                publisher.close()
        if self._helps:
            self._store.keep(self._run, set())  # the base that it was given

    # Parts

    def _restored_before(self, origin: Origin, number: int) -> Restored | None:
        """The reply of the same restore, when nothing has happened since."""
        if self._last_restore is None or self._last_restore[0] != origin:
            return None
        reply = self._last_restore[1]
        untouched = self.state.phase is steps.Phase.IDLE and self.state.version == reply.version
        return reply if untouched and reply.version.number == number else None

    def _assemble(self) -> None:
        if self._publisher is None:
            self._publisher = Publisher(self._store, self._run, self._rank.backend.weight_layout())
        self._learner = run_learner(self._rank.config, self._rank.algorithm, self._leader)

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
            self.state, self.gang_lost = steps.lost(self.state), True
            raise Refusal(
                "GANG_LOST", f"{error}; form the trainer group anew and restore a checkpoint", "unavailable"
            ) from error

    def _claim_lineage(self, *, required: bool = False) -> Saver | None:
        config = self._rank.config.checkpoint
        if not (config.enabled or required):
            return None
        version = steps.held_version(self.state)
        try:
            lineage = self.checkpoints.new_lineage(self._origin, version.number, self._store_id)
        except OSError as error:
            if required:
                raise Refusal(
                    "CHECKPOINT_FAILED", f"{self.checkpoints.root}: {error}; free the disk", "exhausted"
                ) from error
            return None  # asked for again by the first save
        self.saver = Saver(self.checkpoints, lineage, config.keep)
        return self.saver
