"""The checkpoints of one run on its leader: their directory, the lineage that it writes, and the write in flight.

Knows no rounds: `Session` says what is saved and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace_schema.openings import TrainerConfig

from headrace_trainer.backends._base import ReferenceFacts
from headrace_trainer.checkpoints.directory import CheckpointDirectory, Snapshot
from headrace_trainer.checkpoints.parts import StateCopy
from headrace_trainer.checkpoints.saver import Saver, Write
from headrace_trainer.checkpoints.tree import Origin, Saved
from headrace_trainer.errors import Refusal
from headrace_trainer.export import exported_model
from headrace_trainer.group.rank import Rank
from headrace_trainer.learning.step import Phase, StepState, Version


@dataclass(frozen=True)
class Restored:
    """What Restore answers."""

    version: Version
    warmup_steps: int
    figures: dict[str, float]
    layout: str = ""
    """How the model lies on the ranks, and why."""
    notes: tuple[str, ...] = ()
    """What was found of the models, for the run's user."""


class RunCheckpoints:
    """`begin` follows each restore: what is saved after it makes a lineage of its own."""

    def __init__(self, run_directory: Path, config: TrainerConfig) -> None:
        self.directory = CheckpointDirectory(run_directory)
        self.origin = Origin()
        self.store_id = ""
        self.manifest = b""
        """Of the recorded step, as the coordinator gave it."""
        self._config, self._model = config.checkpoint, exported_model(config)
        self._saver: Saver | None = None
        self._restored: Restored | None = None

    def check_place(self) -> None:
        """Raises Refusal RUN_DIRECTORY on a host that does not see the runs' directory.

        Checkpoints would lie there alone, and the run would begin anew with the next leader.
        """
        run = self.directory.root.parent
        if not run.parent.is_dir():
            raise Refusal(
                "RUN_DIRECTORY",
                f"{run.parent} is not on this host: a trainer that leads a run writes checkpoints there, for the next "
                "one to read; share the head's data directory under the same path, or start trainers at the head",
            )

    def repeated(self, origin: Origin, number: int, state: StepState) -> Restored | None:
        """The reply of the same restore, when nothing has happened since."""
        last = self._restored
        if last is None or self.origin != origin or last.version.number != number:
            return None
        return last if state.phase is Phase.IDLE and state.version == last.version else None

    def begin(self, origin: Origin, store_id: str, restored: Restored) -> None:
        """A run goes on from `origin`. A lineage that cannot be claimed now is claimed by the first save."""
        self.origin, self.store_id, self._saver, self._restored = origin, store_id, None, restored
        self.directory.sweep()
        if self._config.enabled:
            with suppress(OSError):
                self._saver = self._claim_lineage(restored.version)

    def save(
        self,
        rank: Rank,
        version: Version,
        lineage: Mapping[int, int],
        ledger: bytes,
        retained: Collection[str],
        copied: Callable[[Path], StateCopy],
    ) -> tuple[Write, float]:
        """Begins to write a version, of which `copied` makes the leader's copy; with the seconds that this took.

        The others write their parts into the directory that `copied` is given. Raises Refusal BUSY, or
        CHECKPOINT_FAILED without a lineage.
        """
        saver, started = self._ready_saver(version), time.monotonic()
        write, aside = saver.begin(version)
        if aside is None:
            return write, 0.0
        try:
            copy = copied(aside)
        except BaseException as error:
            saver.cancel(write, aside, str(error))
            if not isinstance(error, OSError):
                raise
            return write, time.monotonic() - started
        saver.start(write, aside, self.snapshot(rank, copy, version, lineage, ledger), retained)
        return write, time.monotonic() - started

    def _ready_saver(self, version: Version) -> Saver:
        if self._saver is None:
            try:
                self._saver = self._claim_lineage(version)
            except OSError as error:
                message = f"{self.directory.root}: {error}; free the disk"
                raise Refusal("CHECKPOINT_FAILED", message, "exhausted") from error
        self._saver.check_idle()
        return self._saver

    def _claim_lineage(self, version: Version) -> Saver:
        lineage = self.directory.new_lineage(self.origin, version.number, self.store_id)
        self.directory.keep_model(self._model)
        return Saver(self.directory, lineage, self._config.keep)

    def snapshot(
        self, rank: Rank, copy: StateCopy, version: Version, lineage: Mapping[int, int], ledger: bytes
    ) -> Snapshot:
        """What is written of a version, of which the leader has `copy`."""
        return Snapshot(
            version=version,
            copy=copy,
            lineage=lineage,
            store_id=self.store_id,
            ledger=ledger,
            step_manifest=self.manifest,
            origin=self.origin,
            reference=rank.backend.reference,
            base_model=rank.base_model,
            algorithm_state=rank.algorithm.state(),
            parts=rank.ranks.world_size,
        )

    def written(self, number: int) -> Write | None:
        """The write of a version, when it is the last one begun and has not failed."""
        return self._saver.written(number) if self._saver else None

    def flight(self) -> Write | None:
        """What is being written."""
        return self._saver.flight() if self._saver else None

    def finish(self) -> None:
        """Waits for what is being written."""
        if self._saver is not None:
            self._saver.finish()

    @property
    def last_failure(self) -> str:
        """Name of the last checkpoint whose write failed, with the reason."""
        return self._saver.last_failure if self._saver else ""


def check_same_models(saved: Saved, reference: ReferenceFacts | None, base: ReferenceFacts | None) -> None:
    """Raises Refusal CHECKPOINT_MISMATCH when a checkpoint was made with another reference or another base model."""
    if _differs(saved.reference, reference):
        assert saved.reference is not None and reference is not None
        raise Refusal(
            "CHECKPOINT_MISMATCH",
            f"trainer.reference: {saved.name} was made with the reference {saved.reference.name} (digest "
            f"{saved.reference.digest}), and this run has {reference.name} (digest {reference.digest}); give the same "
            "reference, or begin a run without from_checkpoint",
            key="trainer.reference",
        )
    if _differs(saved.base_model, base):
        assert saved.base_model is not None and base is not None
        raise Refusal(
            "CHECKPOINT_MISMATCH",
            f"model.path: the adapters of {saved.name} were trained beside the weights of {saved.base_model.name} "
            f"(digest {saved.base_model.digest}), and {base.name} has others (digest {base.digest}); give model.path "
            "and model.dtype as they were",
            key="model.path",
        )


def _differs(saved: ReferenceFacts | None, found: ReferenceFacts | None) -> bool:
    return saved is not None and found is not None and saved.digest != found.digest
