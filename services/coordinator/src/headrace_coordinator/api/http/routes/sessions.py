"""Routes under /v1/sessions: what a loop of the user's own asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from headrace_schema.resources.views import RunView
from headrace_schema.sessions import CheckpointView, Message, Operation, Result, Sample, SessionView
from headrace_schema.spec import RunSpec
from pydantic import BaseModel, Field

from headrace_coordinator.api.http.requests import Key, body_of, keyed_response, known_parameters, read_model

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

LONGEST_WAIT_S = 60.0


class CallRequest(Message):
    """A numbered call."""

    seq: int = Field(ge=1, description="numbers count from 1 over all calls of a session")
    call: Operation


class FutureView(BaseModel):
    """A call, or a request for samples, was accepted."""

    future: str = Field(description="GET /v1/sessions/{session}/results/{future} has its result")


class CheckpointsView(BaseModel):
    """Checkpoints that were saved by name."""

    checkpoints: list[CheckpointView]


class SessionsView(BaseModel):
    """All sessions, oldest first."""

    sessions: list[SessionView]


def session_routes(coordinator: Coordinator) -> APIRouter:
    """The routes of sessions."""
    routes = APIRouter(prefix="/v1/sessions", tags=["sessions"], dependencies=[Depends(known_parameters)])

    @routes.post("", status_code=201, response_model=RunView, openapi_extra=body_of("RunSpec"))
    async def open_session(request: Request, key: Key) -> Response:
        """Queues a session run. The body is a run spec whose workflow is session."""
        spec = await read_model(request, RunSpec, "the session's spec")
        session = await coordinator.sessions.create(spec.model_dump(mode="json"), key)
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
        asked = await read_model(request, CallRequest, "the call")
        return FutureView(future=await coordinator.sessions.submit(session, asked.seq, asked.call))

    @routes.post("/{session}/samples", status_code=202, openapi_extra=body_of("Sample"))
    async def sample_session(request: Request, session: str, key: Key) -> FutureView:
        """Accepts a request for samples; the same Idempotency-Key returns the same future."""
        asked = await read_model(request, Sample, "the request for samples")
        return FutureView(future=await coordinator.sessions.sample(session, asked, key))

    @routes.get("/{session}/results/{future}", response_model=Result)
    async def get_result(
        session: str,
        future: str,
        wait_s: Annotated[
            float, Query(ge=0, le=LONGEST_WAIT_S, description="seconds to wait for a result")
        ] = 30.0,
    ) -> Response:
        """What became of a call or of a request for samples; `pending` where that is not known after `wait_s`."""
        found = await coordinator.sessions.result(f"{session}:{future}", wait_s)
        return Response(found.model_dump_json(), media_type="application/json")

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
