"""Routes under /v1/runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from headrace_schema.access import Visibility
from headrace_schema.changing import RunChange, RunLabels
from headrace_schema.problems import Impossible
from headrace_schema.resources.evaluations import EvaluationView
from headrace_schema.resources.views import (
    CertificateListView,
    CheckpointListView,
    DeletedView,
    EndpointView,
    RunListView,
    RunView,
    StepView,
    TrajectoryListView,
)
from headrace_schema.spec import RunSpec
from pydantic import BaseModel

from headrace_coordinator.access.enforcement import RUN
from headrace_coordinator.api.http.downloads import TAR_ANSWER, folder_answer
from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.http.relay import PATH
from headrace_coordinator.api.http.requests import (
    JSON,
    MAX_EVENT_ID,
    Flag,
    Key,
    PageSize,
    PageToken,
    States,
    VisibilityOfRun,
    body_of,
    foreign_token,
    keyed_response,
    known_parameters,
    known_states,
    page,
    place_of,
    read_model,
    token_of,
    view_response,
)
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.projections.reading import Filter, Order, PageTokenError, read_trajectories

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

NOTE = "Headrace-Note"
"""Header of what the fleet decides of a checked spec, and why."""
DRY_RUN_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"model": RunSpec, "description": "Only checked: the spec with every default."}
}


Code = Annotated[str, Query(description="of a link that POST /v1/links makes, in place of the token")]


class EvaluationListView(BaseModel):
    """A page of evaluations, oldest first."""

    evaluations: list[EvaluationView]
    next_page_token: str = ""


class StepListView(BaseModel):
    """A page of committed steps, oldest first."""

    steps: list[StepView]
    next_page_token: str = ""


def run_routes(coordinator: Coordinator, runs_directory: Path) -> APIRouter:
    """The routes of runs."""
    routes = APIRouter(prefix="/v1/runs", tags=["runs"], dependencies=[Depends(known_parameters)])
    _writes(routes, coordinator)
    _reads(routes, coordinator)
    _records(routes, coordinator, runs_directory)
    return routes


def _writes(routes: APIRouter, coordinator: Coordinator) -> None:
    @routes.post(
        "",
        status_code=201,
        response_model=RunView,
        responses=DRY_RUN_ANSWER,
        openapi_extra=body_of("RunSpec"),
    )
    async def submit_run(
        request: Request,
        key: Key,
        dry_run: Annotated[
            Flag,
            Query(
                description="check only; answers 200 with every default filled in. Scorers and environments of "
                "the spec's own are tried for that, so their code runs"
            ),
        ] = False,
        visibility: VisibilityOfRun = "private",
    ) -> Response:
        """Queues a run. The body is a run spec as JSON; GET /v1/spec-schema describes it."""
        spec = await read_model(request, RunSpec, "the run spec")
        if dry_run:
            try:
                submission = await coordinator.submissions.check(spec)
            except Impossible as error:
                raise invalid(error.problems, "the run spec") from error
            response = view_response(submission.settled)
            if submission.note:
                response.headers[NOTE] = submission.note.encode("ascii", "replace").decode()
            return response
        run_id = request.scope[RUN] = await coordinator.submissions.submit(spec, key, visibility)
        return keyed_response(coordinator.reads.run(run_id), key, 201)

    @routes.post("/{run_id}:pause", response_model=RunView)
    async def pause_run(
        run_id: str,
        key: Key,
        now: Annotated[Flag, Query(description="abort the step in hand instead of finishing it")] = False,
    ) -> Response:
        """Pauses a run, which then releases its devices."""
        return keyed_response(await coordinator.run_changes.pause(run_id, now, key), key)

    @routes.post("/{run_id}:resume", response_model=RunView)
    async def resume_run(run_id: str, key: Key) -> Response:
        """Goes on with a paused run."""
        return keyed_response(await coordinator.run_changes.resume(run_id, key), key)

    @routes.post("/{run_id}:set", response_model=RunView, openapi_extra=body_of("RunChange", JSON))
    async def set_run(request: Request, run_id: str, key: Key) -> Response:
        """Changes a run from its next step on: the number of its trainer's ranks."""
        change = await read_model(request, RunChange, "the change")
        return keyed_response(await coordinator.run_changes.change(run_id, change, key), key)

    @routes.post("/{run_id}:label", response_model=RunView, openapi_extra=body_of("RunLabels", JSON))
    async def label_run(request: Request, run_id: str, key: Key) -> Response:
        """Gives a run tags or a note for people; works on ended runs too."""
        change = await read_model(request, RunLabels, "the request to label")
        return keyed_response(await coordinator.run_changes.label(run_id, change, key), key)

    @routes.post("/{run_id}:share", response_model=RunView)
    async def share_run(
        run_id: str, visibility: Annotated[Visibility, Query(description="who sees it from now on")], key: Key
    ) -> Response:
        """Changes who sees a run, ended ones too: `private` its owner, `team` their team as well, `fleet` everybody."""
        return keyed_response(await coordinator.run_changes.share(run_id, visibility, key), key)

    @routes.post("/{run_id}:cancel", response_model=RunView)
    async def cancel_run(run_id: str, key: Key) -> Response:
        """Ends a run; the checkpoints that it has stay."""
        return keyed_response(await coordinator.run_changes.cancel(run_id, key), key)

    @routes.post("/{run_id}:delete", response_model=DeletedView)
    async def delete_run(run_id: str, key: Key) -> Response:
        """Deletes an ended run with its checkpoints, export and files, for ever."""
        await coordinator.run_changes.delete(run_id, key)
        return keyed_response(DeletedView(id=run_id), key)


def _reads(routes: APIRouter, coordinator: Coordinator) -> None:
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
            shown, place = coordinator.reads.runs(
                page_size, page_token, known_states(state), order == "oldest"
            )
        except ValueError as error:
            raise foreign_token(page_token) from error
        if not full:
            shown = [run.model_copy(update={"spec": {}}) for run in shown]
        return view_response(RunListView(runs=shown, next_page_token=token_of(place)))

    @routes.get("/{run_id}", response_model=RunView)
    async def get_run(run_id: str) -> Response:
        """One run: its state, what it waits for, its evaluations and its counts."""
        return view_response(coordinator.reads.run(run_id))

    @routes.get("/{run_id}/endpoint", response_model=EndpointView)
    async def get_endpoint(run_id: str, request: Request) -> Response:
        """Where clients of an online run speak with its policy, and the key that they show."""
        base_url = str(request.base_url).rstrip("/") + PATH.format(run=run_id)
        return view_response(coordinator.reads.endpoint(run_id, base_url))

    @routes.get("/{run_id}/metrics", response_model=StepListView)
    async def list_steps(run_id: str, page_size: PageSize = 50, page_token: PageToken = "") -> Response:
        """Committed steps of the live lineage, oldest first."""
        shown, place = await coordinator.past.steps(run_id, page_size, place_of(page_token))
        return view_response(StepListView(steps=shown, next_page_token=token_of(place)))

    @routes.get("/{run_id}/evaluations", response_model=EvaluationListView)
    async def list_evaluations(run_id: str, page_size: PageSize = 50, page_token: PageToken = "") -> Response:
        """Evaluations of the live lineage, oldest first; a run's own view has the first one and the newest."""
        shown, place = await coordinator.past.evaluations(run_id, page_size, place_of(page_token))
        return view_response(EvaluationListView(evaluations=shown, next_page_token=token_of(place)))


def _records(routes: APIRouter, coordinator: Coordinator, runs_directory: Path) -> None:
    @routes.get("/{run_id}/trajectories", response_model=TrajectoryListView)
    async def list_trajectories(
        run_id: str,
        page_size: PageSize = 50,
        page_token: PageToken = "",
        step: Annotated[int | None, Query(ge=0, description="only this step's")] = None,
        prompt: Annotated[
            int | None, Query(ge=0, description="only the group of this prompt ordinal")
        ] = None,
        search: Annotated[
            str, Query(max_length=200, description="only with this in prompt, answer or reference")
        ] = "",
        finish_reason: Annotated[str, Query(max_length=40, description="only ended so: EOS, LENGTH …")] = "",
        failed: Annotated[str, Query(max_length=100, description="only those this scorer gave nothing")] = "",
        order: Annotated[Order, Query(description="by time, or by reward: best or worst first")] = "oldest",
    ) -> Response:
        """A sample of the settled trajectories as text."""
        directory = runs_directory / coordinator.reads.run(run_id).id
        only = Filter(step, prompt, search, finish_reason, failed)
        try:
            found = await asyncio.to_thread(
                read_trajectories, directory, page_token, page_size, only=only, order=order
            )
        except PageTokenError as error:
            raise foreign_token(page_token) from error
        return view_response(found)

    @routes.get("/{run_id}/checkpoints", response_model=CheckpointListView)
    async def list_checkpoints(run_id: str, page_size: PageSize = 50, page_token: PageToken = "") -> Response:
        """Durable checkpoints, newest first."""
        found = await coordinator.past.checkpoints(run_id)
        shown, token = page(found, lambda checkpoint: checkpoint.name, page_size, page_token)
        return view_response(CheckpointListView(checkpoints=shown, next_page_token=token))

    @routes.get("/{run_id}/checkpoints/{name:path}", response_class=StreamingResponse, responses=TAR_ANSWER)
    async def get_checkpoint(run_id: str, name: str, code: Code = "") -> Response:
        """All files of a durable checkpoint, as a tar file."""
        names = [checkpoint.name for checkpoint in await coordinator.past.checkpoints(run_id)]
        if name not in names:
            have = f"it has {', '.join(names[:5])}" if names else "it has none"
            raise Refused("NOT_FOUND", f"run {run_id} has no checkpoint {name!r}; {have}")
        directory = Path(coordinator.reads.run(run_id).run_directory)
        folder, label = directory / "checkpoints" / name, f"{run_id}-{name.replace('/', '-')}"
        return await folder_answer(directory.parent, folder, label, f"checkpoint {name} of run {run_id}")

    @routes.get("/{run_id}/export", response_class=StreamingResponse, responses=TAR_ANSWER)
    async def get_export(run_id: str, code: Code = "") -> Response:
        """The exported model of a run that has ended with one, as a tar file."""
        run = coordinator.reads.run(run_id)
        if not run.export_path:
            hint = f"headrace run export {run_id} makes one of a checkpoint"
            raise Refused("NOT_FOUND", f"run {run_id} has no exported model; {hint}")
        runs, path = Path(run.run_directory).parent, Path(run.export_path)
        return await folder_answer(runs, path, f"{run_id}-export", f"the export of run {run_id}")

    @routes.get("/{run_id}/certificates", response_model=CertificateListView)
    async def list_certificates(
        run_id: str,
        page_size: PageSize = 50,
        page_token: PageToken = "",
        order: Annotated[Literal["oldest", "newest"], Query(description="which come first")] = "oldest",
    ) -> Response:
        """Certificates of the updates; those of abandoned versions are not live."""
        newest = order == "newest"
        behind = MAX_EVENT_ID if newest and not page_token else place_of(page_token)
        shown, place = await coordinator.past.certificates(run_id, page_size, behind, newest=newest)
        return view_response(CertificateListView(certificates=shown, next_page_token=token_of(place)))
