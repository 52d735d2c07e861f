"""One Generate stream: reads assignments, hands them to the engine, sends what comes back in batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.lease.fence import Fence
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.config import RESPONSE_BYTES, WAITING_SAMPLES
from headrace_rollout.engines.base import Group, Output
from headrace_rollout.refusal import refusals
from headrace_rollout.run import OpenedRun
from headrace_rollout.wire import (
    fill_chunk,
    fill_trajectory,
    groups_of,
    partial_of,
    stream_of,
)

_POLL_S = 0.02

Requests = AsyncIterator[rollout_pb2.GenerateRequest]


class Revoked:
    """The stream's lease was revoked, and what its samples had has come back."""


Item = list[Output] | ServiceError | Revoked | None


class Generation:
    """The life of a stream.

    It serves under the lease of its opening, or of the last Reauthorize; `after_response` is called after each
    response.
    """

    def __init__(
        self,
        run: OpenedRun,
        opening: rollout_pb2.GenerateOpen,
        producer: str,
        *,
        fence: Fence,
        after_response: Callable[[], None],
    ) -> None:
        self._run = run
        self._producer = producer
        self._evaluation = opening.evaluation
        self._fence = fence
        self._header = opening.header
        self._after_response = after_response
        self._outstanding = 0
        self._reading = True
        self._revoked = self._revoking = False
        # Outputs, or None when the caller has nothing more to assign, or what ends the stream.
        self._inbox: asyncio.Queue[Item] = asyncio.Queue()
        self.ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def put(item: list[Output] | ServiceError) -> None:
            loop.call_soon_threadsafe(self._inbox.put_nowait, item)

        self._stream = stream_of(opening, put, lambda reason: put(_failed(reason)), self._holds)

    @property
    def lease_epoch(self) -> int:
        """See `LiveStream`."""
        return self._header.lease_epoch

    def _holds(self) -> bool:
        return self._fence.holds(self._header.lease_epoch)

    async def revoke(self) -> None:
        """See `LiveStream`."""
        self._revoking = True
        await self._run.engine.abort(None, stream=self._stream)
        self._inbox.put_nowait(Revoked())

    async def responses(self, requests: Requests) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        """Responses until everything that was assigned has ended; aborts what still runs when left early."""
        reader = asyncio.create_task(self._read(requests), name="read assignments")
        self._run.streams.add(self)
        try:
            while not self._revoked and (self._reading or self._outstanding or self._revoking):
                response = self._response(await self._next_outputs())
                if response.chunks or response.partials or response.revoked:
                    yield response
                    self._after_response()
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            await self._run.engine.abort(None, stream=self._stream)
            self._keep_unsent()
            self._run.streams.discard(self)
            self.ended.set()

    def end(self) -> None:
        """Ends the stream with ABORTED RUN_CLOSED after what the engine has returned."""
        self._inbox.put_nowait(
            ServiceError(
                grpc.StatusCode.ABORTED,
                "RUN_CLOSED",
                f"{self._run.name} was closed; its partial outputs are out",
            )
        )

    async def _read(self, requests: Requests) -> None:
        try:
            async for request in requests:
                await self._obey(request)
        except ServiceError as error:
            self._inbox.put_nowait(error)
        except Exception as error:  # noqa: BLE001  # without its reader, a stream would stay open for ever
            message = f"reading assignments failed: {type(error).__name__}: {error}"
            self._inbox.put_nowait(ServiceError(grpc.StatusCode.INTERNAL, "BUG", message))
        else:
            self._inbox.put_nowait(None)

    async def _obey(self, request: rollout_pb2.GenerateRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "assign":
            await self._assign(request.assign)
        elif kind == "reauthorize":
            self._fence.check(request.reauthorize.header, lease=True)
            self._header = request.reauthorize.header
        else:
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID", "GenerateOpen comes first and once"
            )

    async def _assign(self, request: rollout_pb2.AssignGroups) -> None:
        self._check_custody()
        groups = groups_of(request.groups, self._run.codec)
        # Not reading the next assignment slows the caller through the stream's flow control.
        while self._run.engine.waiting_samples > WAITING_SAMPLES:  # noqa: ASYNC110  # counted in a thread
            await asyncio.sleep(_POLL_S)
        self._fence.check(self._header, lease=True)
        if not self._revoking:  # What is not begun is assigned elsewhere.
            await self._submit(groups)

    async def _submit(self, groups: list[Group]) -> None:
        count = sum(len(group.samples) for group in groups)
        self._outstanding += count
        with refusals():
            await self._run.engine.submit(self._stream, groups)

    def _check_custody(self) -> None:
        retention = self._run.retention
        if retention.full and not self._evaluation:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "CUSTODY_FULL",
                f"{len(retention)} trajectories, {retention.size_bytes} bytes, are kept; {retention.budget_bytes} "
                "are allowed: call ReleaseTrajectories for what is trained or dropped",
            )

    async def _next_outputs(self) -> list[Output]:
        """At least one item of the inbox, and what else is there up to a response's size."""
        outputs = self._opened(await self._inbox.get())
        tokens = 0
        while not (self._inbox.empty() or self._revoked) and tokens < RESPONSE_BYTES // 8:
            if isinstance(item := self._inbox.get_nowait(), ServiceError):
                self._inbox.put_nowait(item)  # After the outputs that came before it have been sent.
                break
            more = self._opened(item)
            tokens += sum(len(output.prompt_ids) + len(output.token_ids) for output in more)
            outputs += more
        return outputs

    def _opened(self, item: Item) -> list[Output]:
        if isinstance(item, ServiceError):
            raise item
        if isinstance(item, Revoked):
            self._revoked = True
            return []
        if item is None:
            self._reading = False
            return []
        return list(item)

    def _response(self, outputs: list[Output]) -> rollout_pb2.GenerateResponse:
        response = rollout_pb2.GenerateResponse(revoked=self._revoked)
        for output in outputs:
            self._outstanding -= output.whole is not None
            if output.stopped:
                response.partials.append(partial_of(output))
            else:
                chunk = response.chunks.add()
                fill_chunk(chunk, output, self._stream)
                if output.finish is not None:
                    self._finish(chunk.finished, output)
        return response

    def _finish(self, trajectory: common_pb2.Trajectory, output: Output) -> None:
        """Fills the trajectory of a finished output where it stands, and takes it into retention."""
        fill_trajectory(trajectory, output, self._stream, self._run.codec, self._producer)
        if not self._evaluation:
            self._run.retention.add(trajectory)

    def _keep_unsent(self) -> None:
        # What finished while the caller went away is still the producer's to keep.
        while not self._inbox.empty():
            item = self._inbox.get_nowait()
            for output in item if isinstance(item, list) else []:
                if output.finish is not None:
                    self._finish(common_pb2.Trajectory(), output)


def _failed(reason: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INTERNAL, "ENGINE_FAILED", f"the engine failed in a decode round: {reason}"
    )
