"""The calls that give out what was trained: versions, checkpoints, exported models. Decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import check_page

from headrace_trainer.checkpoints.directory import CheckpointDirectory
from headrace_trainer.checkpoints.saver import Write
from headrace_trainer.session.session import Session
from headrace_trainer.session.versions import Published
from headrace_trainer.wire import messages as wire
from headrace_trainer.wire.calls import Calls, Context, check_path, elsewhere, refusals

LEDGER_PIECE_BYTES = 1024 * 1024


class OutputCalls(Calls):
    """PublishPolicy, SaveCheckpoint, ListCheckpoints, FetchLedger and ExportModel."""

    async def PublishPolicy(
        self, request: trainer_pb2.PublishPolicyRequest, context: Context
    ) -> trainer_pb2.PublishPolicyResponse:
        self._check(request.header, lease=False)
        return await self._publish(self._session(), request.header.run, request.number)

    async def _publish(
        self, session: Session, run: str, number: int, first: Callable[[], None] = lambda: None
    ) -> trainer_pb2.PublishPolicyResponse:
        """Publishes a version after `first`, which runs in the compute thread too."""

        def act() -> Published:
            first()
            return session.publish(number)

        started = time.monotonic()
        published = await self._compute(act)
        return trainer_pb2.PublishPolicyResponse(
            version=published.version,
            manifest=published.manifest,
            source=published.source,
            publish_time=wire.duration(published.cast_seconds + time.monotonic() - started),
        )

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> trainer_pb2.SaveCheckpointResponse:
        self._check(request.header, lease=False)
        write, stood_still = await self._save(request)
        if request.wait:
            with refusals():
                await asyncio.wrap_future(write.done)
        if write.durable:
            checkpoint = wire.checkpoint_message(write.done.result())
        else:
            checkpoint = trainer_pb2.Checkpoint(name=write.name, version=wire.version_message(write.version))
        return trainer_pb2.SaveCheckpointResponse(
            checkpoint=checkpoint, durable=write.durable, snapshot_time=wire.duration(stood_still)
        )

    async def ListCheckpoints(
        self, request: trainer_pb2.ListCheckpointsRequest, context: Context
    ) -> trainer_pb2.ListCheckpointsResponse:
        self._check(request.header, lease=False)
        first = check_page(request.page_size, request.page_token)
        directory = self._checkpoints(request.source_run_directory)
        found = await elsewhere(directory.live)
        size = request.page_size or 50
        page = found[first : first + size]
        return trainer_pb2.ListCheckpointsResponse(
            checkpoints=[wire.checkpoint_message(saved) for saved in page],
            next_page_token=str(first + size) if first + size < len(found) else "",
            last_failure="" if request.source_run_directory else self._trainer.last_failure(),
            set_aside=[wire.set_aside_message(found) for found in directory.asides.take_reports()],
        )

    async def FetchLedger(
        self, request: trainer_pb2.FetchLedgerRequest, context: Context
    ) -> AsyncIterator[trainer_pb2.FetchLedgerResponse]:
        self._check(request.header, lease=False)
        directory = self._checkpoints(request.source_run_directory)
        ledger = await elsewhere(directory.ledger, request.checkpoint)
        for start in range(0, len(ledger), LEDGER_PIECE_BYTES):
            yield trainer_pb2.FetchLedgerResponse(data=ledger[start : start + LEDGER_PIECE_BYTES])

    async def ExportModel(
        self, request: trainer_pb2.ExportModelRequest, context: Context
    ) -> trainer_pb2.ExportModelResponse:
        self._check(request.header, lease=False)
        path, version = await self._compute(self._session().export, request.name)
        return trainer_pb2.ExportModelResponse(path=str(path), version=wire.version_message(version))

    def _checkpoints(self, source: str) -> CheckpointDirectory:
        if source:
            check_path("source_run_directory", source)
        with refusals():
            return self._trainer.checkpoints(source)

    async def _save(self, request: trainer_pb2.SaveCheckpointRequest) -> tuple[Write, float]:
        """Begins a checkpoint. A call that waits takes its turn after the one in flight, within its own deadline."""
        session = self._session()
        while True:
            try:
                return await self._compute(
                    session.save, request.number, bytes(request.ledger), list(request.retained_checkpoints)
                )
            except ServiceError as error:
                if not (request.wait and error.reason == "BUSY"):
                    raise
            flight = session.checkpoints.flight()
            if flight is not None:
                # Its own caller is told how it ends.
                await asyncio.wait([asyncio.wrap_future(flight.done)])
