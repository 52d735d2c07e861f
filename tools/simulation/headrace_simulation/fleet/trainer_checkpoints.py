"""A simulated trainer's checkpoints: written beside training, set aside where they are damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace.trainer.v1 import trainer_pb2 as trainer

from headrace_simulation.fleet.disk import Disk, StoredCheckpoint
from headrace_simulation.fleet.trainer_group import GroupedTrainer

PIECE_BYTES = 1 << 20
"""Of a ledger, in one message."""


@dataclass
class TrainerCheckpoints(GroupedTrainer):
    """The calls that save, list and read checkpoints."""

    disk: Disk = field(default_factory=Disk)
    reports: list[trainer.SetAsideCheckpoint] = field(default_factory=list)
    writing: tuple[int, asyncio.Future[None]] | None = None
    lineage: int = 0
    """Where it writes: stays when a version is carried to another group."""
    keep: int = 0
    last_failure: str = ""

    async def SaveCheckpoint(self, request: trainer.SaveCheckpointRequest) -> trainer.SaveCheckpointResponse:
        self.fence(request.header, lease=False)
        if self.phase == trainer.STEP_PHASE_COMMITTED or self.version.number != request.number:
            raise self._refuse("CONFLICT", f"version {request.number} is not held and recorded")
        self._lead()
        name = f"lineage-{self.lineage}/step-{self.version.ordinal}-{request.number}"
        stored = StoredCheckpoint(self.directory, name, self.version, self.weights, request.ledger)
        while self.writing is not None and not self.writing[1].done() and self.writing[0] != request.number:
            if not request.wait:
                raise self._refuse("BUSY", f"the checkpoint of version {self.writing[0]} is being written")
            await asyncio.wait({self.writing[1]})
        if not self._written(request.number):
            self.writing = (
                request.number,
                asyncio.ensure_future(self._mortal(self._write(stored, list(request.retained_checkpoints)))),
            )
            self.writing[1].add_done_callback(lambda done: done.cancelled() or done.exception())
        if request.wait and self.writing is not None:
            await asyncio.shield(self.writing[1])
        return trainer.SaveCheckpointResponse(
            checkpoint=trainer.Checkpoint(name=name, version=stored.version), durable=request.wait
        )

    def _written(self, number: int) -> bool:
        """The version is being written, or was, by the last write."""
        if self.writing is None or self.writing[0] != number:
            return False
        done = self.writing[1]
        return not done.done() or (not done.cancelled() and done.exception() is None)

    async def _write(self, stored: StoredCheckpoint, retained: list[str]) -> None:
        self.last_failure = ""
        await asyncio.sleep(self.rng.uniform(0.2, 2.0))
        if self.disk.full:
            self.last_failure = f"{stored.name}: no space left on device"
            raise self._refuse("CHECKPOINT_NOT_WRITTEN", self.last_failure)
        self.disk.save(stored, self.keep, retained)

    def _source(self, directory: str) -> str:
        """The directory to read checkpoints from: this run's own, or one beside it."""
        if not self.directory:
            raise self._refuse("NOT_OPEN", "no run is open: call OpenRun first")
        if not directory:
            return self.directory
        if directory == self.directory or directory.rpartition("/")[0] != self.directory.rpartition("/")[0]:
            raise self._refuse("INVALID", f"source_run_directory {directory!r} is not beside this run's")
        if not self.disk.listed(directory):
            raise self._refuse("NOT_FOUND", f"source_run_directory {directory!r} has no checkpoints")
        return directory

    def _intact(self, directory: str, name: str) -> StoredCheckpoint:
        found = self.disk.find(directory, name)
        if found is None:
            raise self._refuse("NOT_FOUND", f"no live checkpoint {name!r}")
        if found.damage:
            self._set_aside(found)
            raise self._refuse("CHECKPOINT_DAMAGED", f"{name}: {found.damage}")
        return found

    def _set_aside(self, found: StoredCheckpoint) -> None:
        """Another run's are left in their place."""
        found.set_aside = found.directory == self.directory
        self.reports.append(
            trainer.SetAsideCheckpoint(
                name=found.name,
                reason=found.damage,
                set_aside_as=f"{found.name}.damaged-1" if found.set_aside else "",
            )
        )

    async def ListCheckpoints(
        self, request: trainer.ListCheckpointsRequest
    ) -> trainer.ListCheckpointsResponse:
        self.fence(request.header, lease=False)
        directory = self._source(request.source_run_directory)
        found = self.disk.listed(directory)
        for checkpoint in found:
            if checkpoint.torn:
                self._set_aside(checkpoint)
        reports, self.reports = self.reports, []
        return trainer.ListCheckpointsResponse(
            checkpoints=[trainer.Checkpoint(name=c.name, version=c.version) for c in found if not c.torn],
            set_aside=reports,
            last_failure="" if request.source_run_directory else self.last_failure,
        )

    async def FetchLedger(
        self, requests: AsyncIterator[trainer.FetchLedgerRequest]
    ) -> AsyncIterator[trainer.FetchLedgerResponse]:
        request = await anext(aiter(requests))
        self.fence(request.header, lease=False)
        directory = self._source(request.source_run_directory)
        ledger = self._intact(directory, request.checkpoint).ledger
        for start in range(0, len(ledger), PIECE_BYTES):
            yield trainer.FetchLedgerResponse(data=ledger[start : start + PIECE_BYTES])
