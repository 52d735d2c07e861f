"""Routes under /v1/evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible
from headrace_schema.resources.evaluations import (
    ComparisonView,
    EvaluationRunListView,
    EvaluationRunView,
)

from headrace_coordinator.access.enforcement import RUN
from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.http.requests import (
    Flag,
    Key,
    PageSize,
    PageToken,
    VisibilityOfRun,
    body_of,
    foreign_token,
    keyed_response,
    known_parameters,
    read_model,
    token_of,
    view_response,
)
from headrace_coordinator.api.submission.evaluations import replayed

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

DRY_RUN_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"model": EvaluationSpec, "description": "Only checked: the spec with every default."}
}
Id = Annotated[str, Query(max_length=200, description="id of an evaluation that has succeeded")]


def evaluation_routes(coordinator: Coordinator) -> APIRouter:
    """The routes of evaluations. Their events, transcripts, pause and cancel are those of runs."""
    routes = APIRouter(
        prefix="/v1/evaluations", tags=["evaluations"], dependencies=[Depends(known_parameters)]
    )

    @routes.post(
        "",
        status_code=201,
        response_model=EvaluationRunView,
        responses=DRY_RUN_ANSWER,
        openapi_extra=body_of("EvaluationSpec"),
    )
    async def submit_evaluation(
        request: Request,
        key: Key,
        dry_run: Annotated[
            Flag, Query(description="check only; answers 200 with every default filled in")
        ] = False,
        visibility: VisibilityOfRun = "private",
    ) -> Response:
        """Queues an evaluation of a model or a checkpoint on a suite."""
        asked = await read_model(request, EvaluationSpec, "the evaluation spec")
        if dry_run:
            try:
                await coordinator.submissions.check(asked)
            except Impossible as error:
                raise invalid(error.problems, "the evaluation spec") from error
            return view_response(asked)
        run_id = request.scope[RUN] = await coordinator.submissions.submit(asked, key, visibility)
        return keyed_response(coordinator.suites.suite_evaluation(run_id), key, 201)

    @routes.post(":replay", status_code=201, response_model=EvaluationRunView)
    async def replay_start(
        request: Request,
        run: Annotated[
            str, Query(max_length=200, description="id of a run of episodes, or of an evaluation")
        ],
        start: Annotated[
            str, Query(max_length=400, description="words of a start state, or the name of a video")
        ],
        key: Key,
    ) -> Response:
        """Queues one episode from a start state of a run, with the newest checkpoint of its policy, and films it."""
        if not coordinator.reads.sees(run):
            raise coordinator.reads.missing(run)
        try:
            asked = replayed(coordinator.reads.run(run), start)
        except Impossible as error:
            raise invalid(error.problems, "the start state") from error
        run_id = request.scope[RUN] = await coordinator.submissions.submit(asked, key)
        return keyed_response(coordinator.suites.suite_evaluation(run_id), key, 201)

    @routes.get("", response_model=EvaluationRunListView)
    async def list_suite_evaluations(page_size: PageSize = 50, page_token: PageToken = "") -> Response:
        """Evaluations, newest first."""
        try:
            shown, place = coordinator.suites.suite_evaluations(page_size, page_token)
        except ValueError as error:
            raise foreign_token(page_token) from error
        return view_response(EvaluationRunListView(evaluations=shown, next_page_token=token_of(place)))

    @routes.get(":compare", response_model=ComparisonView)
    async def compare_evaluations(first: Id, second: Id) -> Response:
        """The differences of two evaluations of the same items: second minus first, item by item."""
        return view_response(await coordinator.suites.compare_evaluations(first, second))

    @routes.get("/{evaluation_id}", response_model=EvaluationRunView)
    async def get_evaluation(evaluation_id: str) -> Response:
        """One evaluation: its state and place in the queue, how far it is, and what it found."""
        return view_response(coordinator.suites.suite_evaluation(evaluation_id))

    return routes
