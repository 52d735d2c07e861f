"""The checkpoints of one run on its leader: their directory, the lineage that it writes, and the write in flight.

Knows no rounds: `Session` says what is saved and when.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace_schema.openings import TrainerConfig
from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.stores.files import addressed

from headrace_trainer.checkpoints.directory import CheckpointDirectory, Snapshot
from headrace_trainer.checkpoints.parts import StateCopy
from headrace_trainer.checkpoints.reader import ReferenceFacts
from headrace_trainer.checkpoints.tree import Origin, Saved
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.step import Phase, StepState, Version
from headrace_trainer.ranks.rank import Rank

_log = get_logger(__name__)
FINISH_S = 60.0
_KEPT: dict[str, Any] = {"model": True, "seed": True, "trainer": {"lora": True}, "policies": True}


def exported_model(config: TrainerConfig, *, judges: bool) -> dict[str, object]:
    """What the files of a run must keep of its configuration, so that its checkpoints can be exported; `judges`: as a
    reward model, whose form the algorithm says.
    """
    found: dict[str, object] = addressed(
        config.model_dump(mode="json", include=_KEPT | ({"algorithm": True} if judges else {}))
    )
    return found


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


@dataclass(frozen=True)
class Write:
    """A checkpoint being written, or written: `done` gives it, or raises Refusal. `abandoned`: nobody waits for it."""

    name: str
    version: Version
    done: Future[Saved] = field(default_factory=Future)
    abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def durable(self) -> bool:
        """It is on disk."""
        return self.done.done() and self.done.exception() is None


class RunCheckpoints:
    """`begin` follows each restore: what is saved after it makes a lineage of its own.

    One is written at a time, in the background, while the next step runs.
    """

    def __init__(self, run_directory: Path, config: TrainerConfig, *, judges: bool) -> None:
        self.directory = CheckpointDirectory(run_directory)
        self.origin = Origin()
        self.store_id = ""
        self.manifest = b""
        """Of the recorded step, as the coordinator gave it."""
        self.last_failure = ""
        """Name of the last checkpoint whose write failed, with the reason."""
        self._config, self._model = config.checkpoint, exported_model(config, judges=judges)
        self._lineage: int | None = None
        self._write: Write | None = None
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
        self.origin, self.store_id, self._restored = origin, store_id, restored
        self._lineage, self._write, self.last_failure = None, None, ""
        self.directory.sweep()
        if self._config.enabled:
            with suppress(OSError):
                self._claim_lineage(restored.version)

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

        The others write their parts into the directory that `copied` is given. When it is written, older checkpoints
        than the newest are deleted, not the `retained` ones. Raises Refusal BUSY, or CHECKPOINT_FAILED without a
        lineage.
        """
        own, started = self._ready_lineage(version), time.monotonic()
        self.last_failure = ""
        self._write = write = Write(f"lineage-{own}/step-{version.ordinal}", version)
        write.done.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        aside: Path | None = None
        try:
            aside = self.directory.new_aside(own, version.ordinal)
            copy = copied(aside)
        except BaseException as error:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            self._failed(write, str(error))
            if not isinstance(error, OSError):
                raise
            return write, time.monotonic() - started
        # Not a daemon: a process that ends in peace finishes its checkpoint first.
        arguments = write, own, aside, self.snapshot(rank, copy, version, lineage, ledger), retained
        threading.Thread(target=self._run, args=arguments, name="checkpoint").start()
        return write, time.monotonic() - started

    def _ready_lineage(self, version: Version) -> int:
        if self._lineage is None:
            try:
                self._claim_lineage(version)
            except OSError as error:
                message = f"{self.directory.root}: {error}; free the disk"
                raise Refusal("CHECKPOINT_FAILED", message, "exhausted") from error
        if (flight := self.flight()) is not None:
            raise Refusal(
                "BUSY",
                f"the checkpoint of version {flight.version.number} is still being written; ask again later",
            )
        assert self._lineage is not None
        return self._lineage

    def _claim_lineage(self, version: Version) -> None:
        lineage = self.directory.new_lineage(self.origin, version.number, self.store_id)
        self.directory.keep_model(self._model)
        self._lineage = lineage

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
            reference=rank.backends.reference,
            base_model=rank.backends.base_model,
            algorithm_state=rank.algorithm_state(),
            parts=rank.ranks.world_size,
        )

    def _run(
        self, write: Write, lineage: int, aside: Path, snapshot: Snapshot, retained: Collection[str]
    ) -> None:
        try:
            saved = self.directory.write(lineage, snapshot, write.abandoned.is_set, aside)
            # Read back before older ones go: one that cannot be read replaces nothing.
            self.directory.verify(saved)
            self.directory.prune(lineage, self._config.keep, retained)
        except (OSError, ServiceError, Refusal) as error:
            self._failed(write, str(error))
        else:
            write.done.set_result(saved)
        finally:
            if not write.done.done():
                self._failed(write, "an error in the trainer; see its log")

    def _failed(self, write: Write, reason: str) -> None:
        if write is self._write:
            self.last_failure = f"{write.name}: {reason}"
        _log.error("checkpoint failed", extra={"checkpoint": write.name, "reason": reason})
        write.done.set_exception(
            Refusal(
                "CHECKPOINT_FAILED",
                f"{write.name} could not be written: {reason}; the checkpoint before it stays; "
                "free the disk or make the run's directory writable",
                "exhausted",
            )
        )

    def flight(self) -> Write | None:
        """What is being written."""
        return self._write if self._write and not self._write.done.done() else None

    def written(self, number: int) -> Write | None:
        """The write of a version, running, or done and still intact on disk, when it is the last one begun."""
        write = self._write
        if write is None or write.version.number != number:
            return None
        if write.done.done() and not (write.durable and self.directory.holds(write.done.result())):
            return None
        return write

    def finish(self, deadline_s: float = FINISH_S) -> None:
        """Waits for what is in flight; what is not done by then never becomes visible."""
        flight = self.flight()
        if flight is None:
            return
        futures.wait([flight.done], deadline_s)
        if not flight.done.done():
            flight.abandoned.set()
            _log.error("checkpoint abandoned", extra={"checkpoint": flight.name, "waited_s": deadline_s})


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
            f"(digest {saved.base_model.digest}), and {base.name} has others (digest {base.digest}); give model.path, "
            "model.dtype and trainer.lora.quantization as they were",
            key="model.path",
        )


def _differs(saved: ReferenceFacts | None, found: ReferenceFacts | None) -> bool:
    return saved is not None and found is not None and saved.digest != found.digest
