"""One Generate stream: groups of text samples for the engine, chunks and trajectories back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

import grpc
import numpy as np
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.requests import invalid
from headrace_servicekit.rpc.trajectories import pack_top
from typing_extensions import override

from headrace_rollout.engines.base import Refused, TellsLikeliest, prefills_of
from headrace_rollout.engines.rows import KEY
from headrace_rollout.engines.samples import Finish, SlotKey, TrajectoryUpdate
from headrace_rollout.environments.pool import Pool
from headrace_rollout.runs.opened import TextRun
from headrace_rollout.sessions.drivers.base import Produced
from headrace_rollout.streams.base import Handover, SampleStream, Serving
from headrace_rollout.streams.trajectories import fill_branch_texts, fill_trajectory
from headrace_rollout.wire import duration_of, fill_chunk, partial_of, refusals, stream_of

_TOKEN_BYTES = 8
_LEASE_LOST = "LEASE_LOST"


class Generation(SampleStream[Produced, rollout_pb2.GenerateResponse]):
    """The life of a Generate stream, whose trajectories the driver of its run makes."""

    def __init__(self, run: TextRun, opening: rollout_pb2.GenerateOpen, serving: Serving) -> None:
        super().__init__(run, opening, serving)
        self._run: TextRun = run
        self._engine, self._codec = run.engine, run.codec
        self._told = time.perf_counter()
        self._shown: set[SlotKey] = set()
        handover: Handover[Sequence[Produced] | ServiceError] = Handover(
            asyncio.get_running_loop(), self._inbox.put_nowait
        )
        put = handover.put
        self._stream = stream_of(opening, put, lambda reason: put(_failed(reason)), self._holds)
        self._driver = run.driver(opening, self._stream, self._inbox.put_nowait, serving)

    async def _submit(self, request: rollout_pb2.AssignGroups) -> None:
        assigned = await self._driver.read(request.groups)
        self._serving.fence.check(self._header, lease=True)
        if self._revoking:  # What is not begun is assigned elsewhere.
            return
        self._outstanding += sum(len(group.samples) for group in request.groups)
        self._shown |= {
            SlotKey(group.prompt_ordinal, sample.sample_index)
            for group in request.groups
            for sample in group.samples
            if sample.shown
        }
        with refusals():
            await self._driver.begin(assigned)

    @override
    async def revoke(self) -> None:
        self._stream.moving.set()
        await super().revoke()

    async def _abort(self) -> None:
        await self._driver.abort()

    @override
    async def _leave(self) -> None:
        await self._driver.close()

    def _size(self, output: Produced) -> int:
        if not isinstance(output, TrajectoryUpdate):
            return 0
        images = sum(len(image.data) for image in output.images) if output.talk is not None else 0
        told = self._teacher_top * len(output.whole.token_ids) if output.whole is not None else 0
        return _TOKEN_BYTES * (len(output.prompt_ids) + len(output.token_ids) + told) + images

    @property
    def _teacher_top(self) -> int:
        return 0 if self._evaluation else self._run.config.teacher_top

    @override
    async def _prepared(self, outputs: Sequence[Produced]) -> Sequence[Produced]:
        """With what the run's teacher, if it has one, finds likeliest in what has ended.

        A sample whose lease ends meanwhile is handed back unbegun.
        """
        teacher = self._run.teacher
        if teacher is None or not self._teacher_top:
            return outputs
        try:
            return [await self._taught(each, teacher) if _is_answer(each) else each for each in outputs]
        except Refused as refused:
            if refused.reason != _LEASE_LOST:
                raise _failed(str(refused)) from refused
        return [_unbegun(each) if _is_answer(each) else each for each in outputs]

    async def _taught(self, output: TrajectoryUpdate, teacher: TellsLikeliest) -> TrajectoryUpdate:
        assert output.whole is not None
        ids = [*output.prompt_ids, *output.whole.token_ids]
        sequence = ids, len(output.prompt_ids)
        [found] = await teacher.likeliest([sequence], self._teacher_top, self._authority)
        ids_TM, log_probs_TM = (np.array([each[kind] for each in found]) for kind in (0, 1))
        known_TM = ids_TM < self._engine.vocabulary_size
        top = pack_top(np.where(known_TM, ids_TM, 0), np.where(known_TM, log_probs_TM, -np.inf))
        return replace(output, teacher_top=top)

    def _authority(self) -> None:
        if not self._holds():
            raise Refused(_LEASE_LOST, "the stream's lease has ended")

    def _respond(self, outputs: Sequence[Produced]) -> rollout_pb2.GenerateResponse | None:
        response = rollout_pb2.GenerateResponse(revoked=self._revoked)
        for output in outputs:
            if isinstance(output, Pool):
                response.lost_pools.append(output.name)
                self._reading = False
                continue
            self._outstanding -= output.whole is not None
            if output.stopped:
                cache = self._serving.caches.keep(output.cache) if output.cache else None
                response.partials.append(partial_of(output, cache))
                continue
            chunk = response.chunks.add()
            fill_chunk(chunk, output, self._stream)
            if output.finish is not None:
                self._fill(chunk.finished, output)
                self._retain(chunk.finished)
        if not (response.chunks or response.partials or response.revoked or response.lost_pools):
            return None
        self._tell_prefills(response)
        self._driver.tell(response)
        self._run.tell_engine(response)
        return response

    def _tell_prefills(self, response: rollout_pb2.GenerateResponse) -> None:
        """Those since the response before. Two streams at once would both tell of all: the caller times one device."""
        since, self._told = self._told, time.perf_counter()
        spans = [span for prefills in prefills_of(self._engine) for span in prefills.ended_after(since)]
        for start, end in spans:
            start = max(start, since)
            response.prefills.add(began_ago=duration_of(self._told - start), lasted=duration_of(end - start))

    def _finished(self, output: Produced) -> common_pb2.Trajectory | None:
        if not isinstance(output, TrajectoryUpdate) or output.finish is None:
            return None
        if self._teacher_top and _is_answer(output) and not output.teacher_top:
            return None  # It is made again.
        trajectory = common_pb2.Trajectory()
        self._fill(trajectory, output)
        return trajectory

    def _fill(self, trajectory: common_pb2.Trajectory, output: TrajectoryUpdate) -> None:
        """Fills the trajectory of a finished output where it stands."""
        raw = self._run.config.raw_texts
        fill_trajectory(trajectory, output, self._stream, self._codec, self._serving.producer, raw_texts=raw)
        if output.key in self._shown:
            fill_branch_texts(trajectory, self._codec)


def _is_answer(output: Produced) -> TypeGuard[TrajectoryUpdate]:
    """Whether something was sampled that may be learned from."""
    if not isinstance(output, TrajectoryUpdate) or output.finish in (None, Finish.ERROR):
        return False
    return output.whole is not None and bool(output.whole.token_ids)


def _unbegun(output: TrajectoryUpdate) -> TrajectoryUpdate:
    return TrajectoryUpdate.untouched(output.key, output.attempt, output.policy_number)


def _failed(reason: str) -> ServiceError:
    if reason.startswith(f"{KEY}: "):  # the spec's fault: making the samples again would not help
        return invalid(KEY, reason.removeprefix(f"{KEY}: "))
    return ServiceError(
        grpc.StatusCode.INTERNAL, "ENGINE_FAILED", f"the engine failed in a decode round: {reason}"
    )
