"""A run on the leader of one trainer group after another, and the version that it holds: restored, carried, given out.

Checkpoints, versions and what is carried are kept by the parts that this folder has for them.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import torch
from headrace_servicekit.weights.store import WeightStore

from headrace_trainer.algorithms._base import judge_of
from headrace_trainer.checkpoints.directory import CheckpointDirectory
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.checkpoints.tree import Origin
from headrace_trainer.errors import OutOfMemory, Quiesced, Refusal, invalid
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.policies import OWN, Learning
from headrace_trainer.ranks.policy_rounds import PolicyRounds
from headrace_trainer.ranks.rounds import Rounds
from headrace_trainer.session.copies import CARRIED, Carried, export_run, write_carried
from headrace_trainer.session.saving import Restored, RunCheckpoints, Write, check_same_models
from headrace_trainer.versions.versions import Published, RunVersions


class HeldRun:
    """What a run holds between its steps, which are `Session`'s. One thread calls it."""

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
        self._helps = False

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
            raise self._no_memory(short) from short
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

    def _no_memory(self, short: OutOfMemory) -> Refusal:
        """What a round for which a device had no room means to who asked for it.

        Where less is tried next, a restore goes on. Else the run ends: the same step would end alike.
        """
        key = "trainer.micro_batch_tokens"
        if not short.retries:
            return invalid(f"{key}: {short.message}; {self.rounds.rank.reduced.fixes()}", key=key)
        return Refusal("OUT_OF_MEMORY", f"{short.message}; restore a checkpoint", "unavailable")

    # The held version

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

    def close(self) -> None:
        """Finishes the checkpoint in flight and drops what the run published."""
        self.checkpoints.finish()
        self._drop_carried()
        if self._versions is not None:
            self._versions.close()
