"""One Generate stream of an online run: slots for the desk, and the sessions that fill them back."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.rollout.v1 import rollout_pb2
from headrace_servicekit.rpc.requests import check_number
from typing_extensions import override

from headrace_rollout.conversations.speaker import Speaker
from headrace_rollout.endpoint.desk import Place
from headrace_rollout.engines.samples import SlotKey, TrajectoryUpdate
from headrace_rollout.runs.opened import OnlineRun
from headrace_rollout.streams.base import Serving
from headrace_rollout.streams.generation import Generation, Produced


class OnlineStream(Generation):
    """The life of a Generate stream whose samples are sessions of outside clients."""

    def __init__(self, run: OnlineRun, opening: rollout_pb2.GenerateOpen, serving: Serving) -> None:
        super().__init__(run, opening, serving)
        self._desk = run.desk
        self._speaker = Speaker(run.engine, self._stream)
        self._desk.opened(self._speaker)

    @override
    async def _submit(self, request: rollout_pb2.AssignGroups) -> None:
        places = []
        for group in request.groups:
            check_number("prompt_ordinal", group.prompt_ordinal)
            for sample in group.samples:
                check_number("samples.sample_index", sample.sample_index)
                key = SlotKey(group.prompt_ordinal, sample.sample_index)
                places.append(Place(key, sample.attempt, group.oldest_version, self._emit, self))
        self._serving.fence.check(self._header, lease=True)
        if self._revoking:  # What is not begun is assigned elsewhere.
            return
        self._outstanding += len(places)
        self._desk.offer(places)
        if self._engine.paused:  # What came behind the pause comes back at once too.
            self._desk.stop(self)

    @override
    def _respond(self, outputs: Sequence[Produced]) -> rollout_pb2.GenerateResponse | None:
        response = super()._respond(outputs)
        if response is not None:
            response.sessions.update(self._desk.news())
        return response

    def _emit(self, update: TrajectoryUpdate) -> None:
        self._inbox.put_nowait([update])

    @override
    async def _abort(self) -> None:
        self._desk.stop(self)

    @override
    async def _leave(self) -> None:
        self._desk.left(self._speaker, self)
        await self._speaker.close()
