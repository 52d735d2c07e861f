"""Routes under /v1/runs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from headrace_schema.changing import RunChange
from headrace_schema.problems import Impossible
from headrace_schema.resources.views import (
    CertificateListView,
    CheckpointListView,
    EvaluationView,
    EventView,
    RunListView,
    RunView,
    StepView,
    TrajectoryListView,
)
from headrace_schema.spec import RunSpec
from pydantic import BaseModel, Field

from headrace_coordinator.api.control import Control
from headrace_coordinator.api.http import sse
from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.http.pagination import foreign_token, page, place_of, token_of
from headrace_coordinator.api.http.requests import (
    Flag,
    GivenKey,
    PageSize,
    PageToken,
    States,
    key_or_new,
    keyed_response,
    known_parameters,
    known_states,
    read_model,
    view_response,
)
from headrace_coordinator.data import Dataset
from headrace_coordinator.projections.reading import Order, PageTokenError, read_trajectories

NOTE = "Headrace-Note"
"""Header of what the fleet decides of a checked spec, and why."""
MAX_EVENT_ID = 2**63 - 1
EventId = Annotated[int, Field(ge=0, le=MAX_EVENT_ID)]
CHANGE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/RunChange"}}},
    }
}
SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            media_type: {"schema": {"$ref": "#/components/schemas/RunSpec"}}
            for media_type in ("application/json", "application/yaml")
        },
    }
}
DRY_RUN_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"model": RunSpec, "description": "Only checked: the spec with every default."}
}
EVENT_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "model": EventView,
        "description": "Server-sent events; each one's data is an EventView, its id the place to go on from.",
        "content": {sse.MEDIA_TYPE: {}},
    }
}


class EvaluationListView(BaseModel):
    """A page of evaluations, oldest first."""

    evaluations: list[EvaluationView]
    next_page_token: str = ""


class StepListView(BaseModel):
    """A page of committed steps, oldest first."""

    steps: list[StepView]
    next_page_token: str = ""


def run_routes(control: Control, runs_directory: Path, heartbeat_s: float) -> APIRouter:
    """The routes of runs."""
    routes = APIRouter(prefix="/v1/runs", tags=["runs"], dependencies=[Depends(known_parameters)])
    _writes(routes, control)
    _reads(routes, control)
    _records(routes, control, runs_directory)
    _events(routes, control, heartbeat_s)
    return routes


def _writes(routes: APIRouter, control: Control) -> None:
    @routes.post(
        "", status_code=201, response_model=RunView, responses=DRY_RUN_ANSWER, openapi_extra=SPEC_BODY
    )
    async def submit_run(
        request: Request,
        dry_run: Annotated[
            Flag, Query(description="check only; answers 200 with every default filled in")
        ] = False,
        idempotency_key: GivenKey = None,
    ) -> Response:
        """Queues a run. The body is a run spec as JSON; GET /v1/spec-schema describes it."""
        spec = await read_model(request, RunSpec, "the run spec")
        # Reads and imports the data source off the loop; what is wrong with it, `check` finds in the cache.
        with suppress(Impossible):
            await asyncio.to_thread(Dataset.open, spec.data, spec.seed)
        if dry_run:
            if problems := await control.check(spec):
                raise invalid(problems, "the run spec")
            settled, why = control.settle(spec)
            response = view_response(settled)
            if why:
                response.headers[NOTE] = why.encode("ascii", "replace").decode()
            return response
        key = key_or_new(idempotency_key)
        return keyed_response(await control.submit(spec, key), key, 201)

    @routes.post("/{run_id}:pause", response_model=RunView)
    async def pause_run(
        run_id: str,
        now: Annotated[Flag, Query(description="abort the step in hand instead of finishing it")] = False,
        idempotency_key: GivenKey = None,
    ) -> Response:
        """Pauses a run and lets its devices go."""
        key = key_or_new(idempotency_key)
        return keyed_response(await control.pause(run_id, now, key), key)

    @routes.post("/{run_id}:resume", response_model=RunView)
    async def resume_run(run_id: str, idempotency_key: GivenKey = None) -> Response:
        """Goes on with a paused run."""
        key = key_or_new(idempotency_key)
        return keyed_response(await control.resume(run_id, key), key)

    @routes.post("/{run_id}:set", response_model=RunView, openapi_extra=CHANGE_BODY)
    async def set_run(request: Request, run_id: str, idempotency_key: GivenKey = None) -> Response:
        """Changes a run from its next step on: the number of its trainer's ranks."""
        change = await read_model(request, RunChange, "the change")
        key = key_or_new(idempotency_key)
        return keyed_response(await control.change(run_id, change, key), key)

    @routes.post("/{run_id}:cancel", response_model=RunView)
    async def cancel_run(run_id: str, idempotency_key: GivenKey = None) -> Response:
        """Ends a run; the checkpoints that it has stay."""
        key = key_or_new(idempotency_key)
        return keyed_response(await control.cancel(run_id, key), key)


def _reads(routes: APIRouter, control: Control) -> None:
    @routes.get("", response_model=RunListView)
    async def list_runs(
        page_size: PageSize = 50,
        page_token: PageToken = "",
        state: States = None,
        order: Annotated[Literal["newest", "oldest"], Query(description="which run comes first")] = "newest",
        full: Annotated[
            Flag, Query(description="with the specs of the runs; without it every `spec` is {}")
        ] = False,
    ) -> Response:
        """Runs, without their specs unless they are asked for."""
        try:
            shown, place = control.runs(page_size, page_token, known_states(state), order == "oldest")
        except ValueError as error:
            raise foreign_token(page_token) from error
        if not full:
            shown = [run.model_copy(update={"spec": {}}) for run in shown]
        return view_response(RunListView(runs=shown, next_page_token=token_of(place)))

    @routes.get("/{run_id}", response_model=RunView)
    async def get_run(run_id: str) -> Response:
        """One run: its state, what it waits for, its evaluations and its counts."""
        return view_response(control.run(run_id))

    @routes.get("/{run_id}/metrics", response_model=StepListView)
    async def list_steps(run_id: str, page_size: PageSize = 50, page_token: PageToken = "") -> Response:
        """Committed steps of the live lineage, oldest first."""
        shown, place = await control.steps(run_id, page_size, place_of(page_token))
        return view_response(StepListView(steps=shown, next_page_token=token_of(place)))

    @routes.get("/{run_id}/evaluations", response_model=EvaluationListView)
    async def list_evaluations(run_id: str, page_size: PageSize = 50, page_token: PageToken = "") -> Response:
        """Evaluations of the live lineage, oldest first; a run's own view has the first one and the newest."""
        shown, place = await control.evaluations(run_id, page_size, place_of(page_token))
        return view_response(EvaluationListView(evaluations=shown, next_page_token=token_of(place)))


def _records(routes: APIRouter, control: Control, runs_directory: Path) -> None:
    @routes.get("/{run_id}/trajectories", response_model=TrajectoryListView)
    async def list_trajectories(
        run_id: str,
        page_size: PageSize = 50,
        page_token: PageToken = "",
        step: Annotated[int | None, Query(ge=0, description="only this step's")] = None,
        prompt: Annotated[
            int | None, Query(ge=0, description="only the group of this prompt ordinal")
        ] = None,
        order: Annotated[Order, Query(description="by time, or by reward: best or worst first")] = "oldest",
    ) -> Response:
        """A sample of the settled trajectories as text."""
        directory = runs_directory / control.run(run_id).id
        try:
            found = await asyncio.to_thread(
                read_trajectories, directory, page_token, page_size, step=step, prompt=prompt, order=order
            )
        except PageTokenError as error:
            raise foreign_token(page_token) from error
        return view_response(found)

    @routes.get("/{run_id}/checkpoints", response_model=CheckpointListView)
    async def list_checkpoints(run_id: str, page_size: PageSize = 50, page_token: PageToken = "") -> Response:
        """Durable checkpoints, newest first."""
        found = await control.checkpoints(run_id)
        shown, token = page(found, lambda checkpoint: checkpoint.name, page_size, page_token)
        return view_response(CheckpointListView(checkpoints=shown, next_page_token=token))

    @routes.get("/{run_id}/certificates", response_model=CertificateListView)
    async def list_certificates(
        run_id: str, page_size: PageSize = 50, page_token: PageToken = ""
    ) -> Response:
        """Certificates of the updates, oldest first; those of abandoned versions are not live."""
        shown, place = await control.certificates(run_id, page_size, place_of(page_token))
        return view_response(CertificateListView(certificates=shown, next_page_token=token_of(place)))


def _events(routes: APIRouter, control: Control, heartbeat_s: float) -> None:
    streams = sse.Streams(heartbeat_s)

    @routes.get("/{run_id}/events", response_class=StreamingResponse, responses=EVENT_ANSWER)
    async def stream_events(
        run_id: str,
        after: Annotated[EventId, Query(description="only events with a higher id")] = 0,
        last_event_id: Annotated[EventId | None, Header(description="as `after`; takes precedence")] = None,
    ) -> Response:
        """Events of a run as they happen, until it has ended."""
        run = control.run(run_id)
        events = control.events(run.id, after if last_event_id is None else last_event_id)
        return StreamingResponse(streams.start(events), 200, sse.HEADERS, sse.MEDIA_TYPE)
