"""Routes under /v1/sessions: what a loop of the user's own asks for."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from headrace_schema.resources.views import RunView
from headrace_schema.sessions import CheckpointView, Message, Operation, Pending, Result, Sample, SessionView
from headrace_schema.spec import RunSpec
from pydantic import BaseModel, Field

from headrace_coordinator.access.enforcement import RUN
from headrace_coordinator.api.http.requests import (
    CALLS,
    Key,
    body_of,
    keyed_response,
    known_parameters,
    read_model,
)
from headrace_coordinator.api.refusal import Refused

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

LONGEST_WAIT_S = 60.0
MOST_RESULTS = 200


class CallRequest(Message):
    """A numbered call."""

    seq: int = Field(ge=1, description="numbers count from 1 over all calls of a session")
    call: Operation


class SamplesRequest(Message):
    """Requests for samples, which are made together where they differ in their prompts alone."""

    samples: list[Sample] = Field(min_length=1, max_length=1000)


class FutureView(BaseModel):
    """A call was accepted."""

    future: str = Field(description="GET /v1/sessions/{session}/results?future= has its result")


class FuturesView(BaseModel):
    """Requests for samples were accepted."""

    futures: list[str] = Field(description="of each request")


class ResultsView(BaseModel):
    """Results by future."""

    results: dict[str, Result]


class CheckpointsView(BaseModel):
    """Checkpoints that were saved by name."""

    checkpoints: list[CheckpointView]


class SessionsView(BaseModel):
    """All sessions, oldest first."""

    sessions: list[SessionView]


def _own(future: str) -> str:
    """A future as the session's routes name it."""
    return future.partition(":")[2]


def session_routes(coordinator: Coordinator) -> APIRouter:
    """The routes of sessions."""
    routes = APIRouter(prefix="/v1/sessions", tags=["sessions"], dependencies=[Depends(known_parameters)])

    @routes.post("", status_code=201, response_model=RunView, openapi_extra=body_of("RunSpec"))
    async def open_session(request: Request, key: Key) -> Response:
        """Queues a session run. The body is a run spec whose workflow is session."""
        spec = await read_model(request, RunSpec, "the session's spec")
        session = request.scope[RUN] = await coordinator.sessions.create(spec.model_dump(mode="json"), key)
        return keyed_response(coordinator.reads.run(session), key, 201)

    @routes.get("")
    async def list_sessions() -> SessionsView:
        """All sessions that were not deleted."""
        return SessionsView(
            sessions=[coordinator.sessions.info(each) for each in coordinator.sessions.listed()]
        )

    @routes.get("/{session}")
    async def get_session(session: str) -> SessionView:
        """A session as it stands."""
        return coordinator.sessions.info(session)

    @routes.post("/{session}/calls", status_code=202, openapi_extra=body_of("CallRequest"))
    async def call_session(request: Request, session: str) -> FutureView:
        """Accepts a numbered call, durably. The same number returns the same future, whatever comes with it."""
        asked = await read_model(request, CallRequest, "the call", CALLS)
        return FutureView(future=_own(await coordinator.sessions.submit(session, asked.seq, asked.call)))

    @routes.post("/{session}/samples", status_code=202, openapi_extra=body_of("SamplesRequest"))
    async def sample_session(request: Request, session: str, key: Key) -> FuturesView:
        """Accepts requests for samples; the same Idempotency-Key returns the same futures."""
        asked = await read_model(request, SamplesRequest, "the request for samples", CALLS)
        keys = [f"{key}.{place}" if key else "" for place in range(len(asked.samples))]
        sample = coordinator.sessions.sample
        return FuturesView(
            futures=[
                _own(await sample(session, each, own)) for each, own in zip(asked.samples, keys, strict=True)
            ]
        )

    @routes.get("/{session}/results", response_model=ResultsView)
    async def get_results(
        session: str,
        future: Annotated[
            list[str], Query(min_length=1, max_length=MOST_RESULTS, description="the futures, once for each")
        ],
        wait_s: Annotated[
            float, Query(ge=0, le=LONGEST_WAIT_S, description="seconds to wait for the first one's result")
        ] = 30.0,
    ) -> Response:
        """What became of calls and requests for samples. The first one is waited for, and is `pending` after `wait_s`;
        the others are there if they have a result then.
        """
        first, *others = [f"{session}:{each}" for each in future]
        found = {future[0]: await coordinator.sessions.result(first, wait_s)}
        for name, each in zip(future[1:], others, strict=True):
            with suppress(Refused):
                found[name] = await coordinator.sessions.result(each, 0.0)
        there = {
            name: result
            for name, result in found.items()
            if name == future[0] or not isinstance(result, Pending)
        }
        return Response(ResultsView(results=there).model_dump_json(), media_type="application/json")

    @routes.get("/{session}/checkpoints")
    async def list_session_checkpoints(session: str) -> CheckpointsView:
        """What the session has saved by name."""
        return CheckpointsView(checkpoints=coordinator.sessions.checkpoints(session))

    @routes.delete("/{session}/checkpoints/{name}", status_code=204)
    async def delete_session_checkpoint(session: str, name: str) -> Response:
        """Deletes a checkpoint that was saved by name, for ever."""
        await coordinator.sessions.delete_checkpoint(session, name)
        return Response(status_code=204)

    @routes.post("/{session}:close", response_model=SessionView)
    async def close_session(session: str) -> SessionView:
        """Ends a session once all of its calls are executed: its last weights are saved, and the run succeeds."""
        await coordinator.sessions.close(session)
        return coordinator.sessions.info(session)

    return routes
