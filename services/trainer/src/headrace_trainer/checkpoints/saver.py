"""Writes one snapshot at a time in the background, while the next step runs. Knows no training."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from headrace_servicekit.logs import get_logger
from headrace_servicekit.rpc.errors import ServiceError

from headrace_trainer.checkpoints.directory import CheckpointDirectory, Snapshot
from headrace_trainer.checkpoints.tree import Saved
from headrace_trainer.errors import Refusal
from headrace_trainer.learning.step import Version

_log = get_logger(__name__)
FINISH_S = 60.0


@dataclass(frozen=True)
class Write:
    """A checkpoint being written, or written: `done` gives it, or raises Refusal."""

    name: str
    version: Version
    done: Future[Saved]

    @property
    def durable(self) -> bool:
        """It is on disk."""
        return self.done.done() and self.done.exception() is None


class Saver:
    """The checkpoint in flight, and why the last one that failed did."""

    def __init__(self, directory: CheckpointDirectory, lineage: int, keep: int) -> None:
        self._directory = directory
        self._lineage = lineage
        self._keep = keep
        self._write: Write | None = None
        self._abandoned = threading.Event()
        self.last_failure = ""

    def flight(self) -> Write | None:
        """What is being written."""
        return self._write if self._write and not self._write.done.done() else None

    def written(self, number: int) -> Write | None:
        """The write of a version, running, or done and still intact on disk, when it is the last one begun."""
        write = self._write
        if write is None or write.version.number != number:
            return None
        if write.done.done() and not (write.durable and self._directory.holds(write.done.result())):
            return None
        return write

    def check_idle(self) -> None:
        """Raises Refusal BUSY while a version is being written."""
        if (flight := self.flight()) is not None:
            raise Refusal(
                "BUSY",
                f"the checkpoint of version {flight.version.number} is still being written; ask again later",
            )

    def begin(self, version: Version) -> tuple[Write, Path | None]:
        """Makes a directory for the ranks' parts of a version; none where that fails, and the write has failed with it.

        `start` or `cancel` follows. Raises Refusal BUSY while another version is being written.
        """
        self.check_idle()
        name = f"lineage-{self._lineage}/step-{version.ordinal}"
        self.last_failure = ""
        self._write = write = Write(name, version, Future())
        write.done.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it
        try:
            return write, self._directory.new_aside(self._lineage, version.ordinal)
        except OSError as error:
            self._failed(write, str(error))
            return write, None

    def cancel(self, write: Write, aside: Path, reason: str) -> None:
        """The state could not be copied: nothing is written."""
        shutil.rmtree(aside, ignore_errors=True)
        self._failed(write, reason)

    def start(self, write: Write, aside: Path, snapshot: Snapshot, retained: Collection[str] = ()) -> None:
        """Begins to write; older checkpoints than the newest are deleted then, not the `retained` ones."""
        # Not a daemon: a process that ends in peace finishes its checkpoint first.
        arguments = write, aside, snapshot, retained
        threading.Thread(target=self._run, args=arguments, name="checkpoint").start()

    def finish(self, deadline_s: float = FINISH_S) -> None:
        """Waits for what is in flight; what is not done by then never becomes visible."""
        flight = self.flight()
        if flight is None:
            return
        futures.wait([flight.done], deadline_s)
        if not flight.done.done():
            self._abandoned.set()
            _log.error("checkpoint abandoned", extra={"checkpoint": flight.name, "waited_s": deadline_s})

    def _run(self, write: Write, aside: Path, snapshot: Snapshot, retained: Collection[str]) -> None:
        try:
            saved = self._directory.write(self._lineage, snapshot, self._abandoned.is_set, aside)
            # Read back before older ones go: one that cannot be read replaces nothing.
            self._directory.verify(saved)
            self._directory.prune(self._lineage, self._keep, retained)
        except (OSError, ServiceError, Refusal) as error:
            self._failed(write, str(error))
        else:
            write.done.set_result(saved)
        finally:
            if not write.done.done():
                self._failed(write, "an error in the trainer; see its log")

    def _failed(self, write: Write, reason: str) -> None:
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
