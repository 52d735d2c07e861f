"""One Generate stream: groups of text samples for the engine, chunks and trajectories back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.errors import ServiceError

from headrace_rollout.config import WAITING_SAMPLES
from headrace_rollout.engines.base import Output
from headrace_rollout.refusal import refusals
from headrace_rollout.run import TextRun
from headrace_rollout.streams import SampleStream, Serving
from headrace_rollout.wire import (
    duration_of,
    fill_chunk,
    fill_trajectory,
    groups_of,
    partial_of,
    stream_of,
)

_POLL_S = 0.02
_TOKEN_BYTES = 8


class Generation(SampleStream[Output, rollout_pb2.GenerateResponse]):
    """The life of a Generate stream."""

    def __init__(self, run: TextRun, opening: rollout_pb2.GenerateOpen, serving: Serving) -> None:
        super().__init__(run, opening, serving)
        self._engine, self._codec = run.engine, run.codec
        self._told = time.perf_counter()
        loop = asyncio.get_running_loop()

        def put(item: list[Output] | ServiceError) -> None:
            loop.call_soon_threadsafe(self._inbox.put_nowait, item)

        self._stream = stream_of(opening, put, lambda reason: put(_failed(reason)), self._holds)

    async def _submit(self, request: rollout_pb2.AssignGroups) -> None:
        groups = groups_of(request.groups, self._codec)
        # Not reading the next assignment slows the caller through the stream's flow control.
        while self._engine.waiting_samples > WAITING_SAMPLES:  # noqa: ASYNC110  # counted in a thread
            await asyncio.sleep(_POLL_S)
        self._serving.fence.check(self._header, lease=True)
        if self._revoking:  # What is not begun is assigned elsewhere.
            return
        self._outstanding += sum(len(group.samples) for group in groups)
        with refusals():
            await self._engine.submit(self._stream, groups)

    async def _abort(self) -> None:
        await self._engine.abort(None, stream=self._stream)

    def _size(self, output: Output) -> int:
        return _TOKEN_BYTES * (len(output.prompt_ids) + len(output.token_ids))

    def _respond(self, outputs: Sequence[Output]) -> rollout_pb2.GenerateResponse | None:
        response = rollout_pb2.GenerateResponse(revoked=self._revoked)
        for output in outputs:
            self._outstanding -= output.whole is not None
            if output.stopped:
                response.partials.append(partial_of(output))
                continue
            chunk = response.chunks.add()
            fill_chunk(chunk, output, self._stream)
            if output.finish is not None:
                self._fill(chunk.finished, output)
                self._retain(chunk.finished)
        if not (response.chunks or response.partials or response.revoked):
            return None
        self._tell_prefills(response)
        return response

    def _tell_prefills(self, response: rollout_pb2.GenerateResponse) -> None:
        """Those since the response before. Two streams at once would both tell of all: the caller times one device."""
        since, self._told = self._told, time.perf_counter()
        spans = [span for prefills in self._engine.prefills for span in prefills.ended_after(since)]
        for start, end in spans:
            start = max(start, since)
            response.prefills.add(began_ago=duration_of(self._told - start), lasted=duration_of(end - start))

    def _finished(self, output: Output) -> common_pb2.Trajectory | None:
        if output.finish is None:
            return None
        trajectory = common_pb2.Trajectory()
        self._fill(trajectory, output)
        return trajectory

    def _fill(self, trajectory: common_pb2.Trajectory, output: Output) -> None:
        """Fills the trajectory of a finished output where it stands."""
        fill_trajectory(trajectory, output, self._stream, self._codec, self._serving.producer)


def _failed(reason: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INTERNAL, "ENGINE_FAILED", f"the engine failed in a decode round: {reason}"
    )
