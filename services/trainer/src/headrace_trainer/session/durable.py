"""How versions come to a run's leader and stay: restored, carried to the next trainer group, saved, exported."""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from headrace_modelkit.lora import is_adapter
from torch import Tensor

from headrace_trainer.allocator import resident_bytes
from headrace_trainer.checkpoints.directory import CheckpointDirectory, Snapshot
from headrace_trainer.checkpoints.reader import CheckpointReader
from headrace_trainer.checkpoints.saver import Saver, Write
from headrace_trainer.checkpoints.tree import Origin, Saved
from headrace_trainer.errors import Quiesced, Refusal, invalid
from headrace_trainer.group.rank import Copies
from headrace_trainer.kinds import export_model
from headrace_trainer.learning import step as steps
from headrace_trainer.session.carrying import CARRIED, Carried, CopiesReader, check_carried
from headrace_trainer.session.held import HeldRun

_EXPORT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Restored:
    """What Restore answers."""

    version: steps.Version
    warmup_steps: int
    figures: dict[str, float]


class DurableRun(HeldRun):
    """Joins the rounds and the checkpoints, which know nothing of each other."""

    _last_restore: tuple[Origin, Restored] | None = None
    _store_id = ""
    _origin = Origin()
    _manifest = b""
    """Of the recorded step, as the coordinator gave it."""

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
        self._check_base(saved)
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

    def _restored_before(self, origin: Origin, number: int) -> Restored | None:
        """The reply of the same restore, when nothing has happened since."""
        if self._last_restore is None or self._last_restore[0] != origin:
            return None
        reply = self._last_restore[1]
        untouched = self.state.phase is steps.Phase.IDLE and self.state.version == reply.version
        return reply if untouched and reply.version.number == number else None

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

    def _check_base(self, saved: Saved | None) -> None:
        """Raises Refusal CHECKPOINT_MISMATCH when a checkpoint's adapters were trained beside other weights."""
        found = self._rank.base_model
        if (
            saved is None
            or saved.base_model is None
            or found is None
            or found.digest == saved.base_model.digest
        ):
            return
        raise Refusal(
            "CHECKPOINT_MISMATCH",
            f"model.path: the adapters of {saved.name} were trained beside the weights of {saved.base_model.name} "
            f"(digest {saved.base_model.digest}), and {found.name} has others (digest {found.digest}); give model.path "
            "and model.dtype as they were",
            key="model.path",
        )

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
            base_model=self._rank.base_model,
            algorithm_state=self._rank.algorithm.state(),
        )

    def export(self, name: str) -> tuple[Path, steps.Version]:
        """Writes the held weights below the run's directory: a Hugging Face one, or a robot policy's.

        Adapters are in the weights, and beside them once more by themselves.
        """
        version = steps.held_version(self.state)
        if not _EXPORT_NAME.fullmatch(name) or name == "checkpoints":
            raise invalid(
                f"name {name[:100]!r}: give a directory's name of letters, digits, '.', '_' and '-' that begins with a "
                "letter or digit and is not 'checkpoints'"
            )
        target = self._directory / name
        weights, adapters = self._whole_weights()
        export_model(self._rank.config, weights, target, adapters)
        return target, version

    def _whole_weights(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Merged weights, and the parts of adapters; both in host memory."""
        if self._rank.config.trainer.lora is None:
            weights: dict[str, Tensor] = {}
            self._gather(weights.update)
            return weights, {}
        copies = self._lead("snapshot")
        assert isinstance(copies, Copies)
        reader = CopiesReader(copies)
        names = (name for name in reader.adapter_shapes() if is_adapter(name))
        return copies.weights, {name: reader.adapter(name) for name in names}

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
