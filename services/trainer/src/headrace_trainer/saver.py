"""Writes one snapshot at a time in the background, while the next step runs. Knows no training."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from headrace_servicekit.errors import ServiceError
from headrace_servicekit.logs import get_logger

from headrace_trainer.checkpoints import CheckpointDirectory, Saved, Snapshot
from headrace_trainer.errors import Refusal

_log = get_logger(__name__)


class Saver:
    """The checkpoint in flight, and why the last one that failed did."""

    def __init__(self, directory: CheckpointDirectory, lineage: int, keep: int) -> None:
        self._directory = directory
        self._lineage = lineage
        self._keep = keep
        self._flight: tuple[int, Future[Saved]] | None = None
        self.last_failure = ""

    def in_flight(self) -> int | None:
        """Number of the version being written."""
        return self._flight[0] if self._flight and not self._flight[1].done() else None

    def flight(self) -> Future[Saved] | None:
        """The write that was begun last, running or done."""
        return self._flight[1] if self._flight else None

    def result(self, number: int) -> Future[Saved] | None:
        """The write of a version, running or done, when it is the last one begun and has not failed."""
        if self._flight is None or self._flight[0] != number:
            return None
        write = self._flight[1]
        return None if write.done() and write.exception() else write

    def name(self, ordinal: int) -> str:
        """Name that the checkpoint of a step gets."""
        return f"lineage-{self._lineage}/step-{ordinal}"

    def start(self, snapshot: Snapshot) -> Future[Saved]:
        """Begins to write. Raises Refusal BUSY while another version is being written."""
        busy = self.in_flight()
        if busy is not None:
            raise Refusal("BUSY", f"the checkpoint of version {busy} is still being written; ask again later")
        write: Future[Saved] = Future()
        self._flight = (snapshot.version.number, write)
        # Not a daemon: a process that ends in peace finishes its checkpoint first.
        threading.Thread(target=self._write, args=(snapshot, write), name="checkpoint").start()
        return write

    def _write(self, snapshot: Snapshot, write: Future[Saved]) -> None:
        name = self.name(snapshot.version.ordinal)
        try:
            saved = self._directory.write(self._lineage, snapshot)
            self._directory.prune(self._lineage, self._keep)
        except (OSError, ServiceError) as error:
            self.last_failure = f"{name}: {error}"
            _log.error("checkpoint failed", extra={"checkpoint": name, "reason": str(error)})
            write.set_exception(
                Refusal(
                    "CHECKPOINT_FAILED", f"{name} could not be written: {error}; free the disk", "exhausted"
                )
            )
            return
        write.set_result(saved)
