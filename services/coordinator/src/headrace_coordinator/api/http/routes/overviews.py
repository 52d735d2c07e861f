"""Routes for lists and plots: runs in short, curves, newest events. What the dashboard reads, and others may."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Query, Response
from headrace_schema.resources.overviews import (
    CurvesView,
    EventListView,
    FlowView,
    HoldView,
    RewardsView,
    RunSummaryListView,
    TimelineView,
)
from headrace_schema.resources.views import RunPlanView

from headrace_coordinator.api.http.requests import (
    MAX_EVENT_ID,
    PageSize,
    PageToken,
    States,
    foreign_token,
    known_parameters,
    known_states,
    place_of,
    token_of,
    view_response,
)
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.projections.reading import read_rewards
from headrace_coordinator.projections.timeline import read_timeline

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

Points = Annotated[int, Query(ge=2, le=2000, description="most steps; more are thinned out evenly")]
Search = Annotated[
    str, Query(max_length=100, description="only runs whose id or a tag contains this; case is ignored")
]

Columns = Annotated[
    list[Annotated[str, Query(max_length=200)]] | tuple[()],
    Query(max_length=30, description="keys of the spec and figures to list beside; *: all that each run has"),
]


def overview_routes(coordinator: Coordinator, runs_directory: Path) -> APIRouter:
    """The routes; timelines are read from `runs_directory`/RUN."""
    routes = APIRouter(prefix="/v1", tags=["runs"], dependencies=[Depends(known_parameters)])

    @routes.get("/run-summaries", response_model=RunSummaryListView)
    async def list_run_summaries(
        page_size: PageSize = 50,
        page_token: PageToken = "",
        state: States = None,
        search: Search = "",
        column: Columns = (),
        evaluations: Annotated[
            bool, Query(description="whether evaluations of suites are among them")
        ] = True,
    ) -> Response:
        """Runs in short, newest first, with a sparkline of rewards; filtered by state and part of id or tag."""
        try:
            shown, place, total = await coordinator.reads.summaries(
                page_size, page_token, known_states(state), search, column, evaluations=evaluations
            )
        except ValueError as error:
            raise foreign_token(page_token) from error
        view = RunSummaryListView(
            summaries=shown,
            total=total,
            states=coordinator.reads.run_states(),
            next_page_token=token_of(place),
        )
        return view_response(view)

    @routes.get("/runs/{run_id}/curves", response_model=CurvesView)
    async def get_curves(run_id: str, points: Points = 500) -> Response:
        """Figures of the live lineage as columns, for plots."""
        return view_response(await coordinator.past.curves(run_id, points))

    @routes.get("/runs/{run_id}/flow", response_model=FlowView)
    async def get_flow(run_id: str) -> Response:
        """Where the slots of the step in hand stand between generation, scoring and learning."""
        return view_response(coordinator.reads.flow(run_id))

    @routes.get("/runs/{run_id}/rewards", response_model=RewardsView)
    async def get_rewards(
        run_id: str, steps: Annotated[int, Query(ge=1, le=500, description="most steps, the newest")] = 100
    ) -> Response:
        """How the rewards of the stored trajectories are spread, by step: a histogram of each."""
        directory = runs_directory / coordinator.reads.run(run_id).id
        return view_response(await asyncio.to_thread(read_rewards, directory, steps))

    @routes.get("/runs/{run_id}/newest-events", response_model=EventListView)
    async def list_newest_events(
        run_id: str, page_size: PageSize = 50, page_token: PageToken = ""
    ) -> Response:
        """Events, newest first, with the number of slots in place of lists of them."""
        before = place_of(page_token) if page_token else MAX_EVENT_ID
        shown, place = await coordinator.past.newest_events(run_id, page_size, before)
        return view_response(EventListView(events=shown, next_page_token=token_of(place)))

    @routes.get("/runs/{run_id}/plan", response_model=RunPlanView)
    async def get_plan(run_id: str) -> Response:
        """How the run uses its devices, why, and what was predicted beside what was measured."""
        plan = coordinator.reads.run(run_id).plan
        if plan is None:
            raise Refused("NOT_FOUND", f"run {run_id} evaluates a suite: it has no plan")
        return view_response(plan)

    @routes.get("/runs/{run_id}/timeline", response_model=TimelineView)
    async def get_timeline(
        run_id: str,
        steps: Annotated[int, Query(ge=1, le=200, description="most steps, the newest ones")] = 20,
        before: Annotated[
            float | None, Query(ge=0, description="only what began before, in seconds since the epoch")
        ] = None,
        labels: Annotated[bool, Query(description="label each device's time: decode, train, wait …")] = False,
    ) -> Response:
        """Who held which device when, and what was done there: of the newest steps."""
        run = coordinator.reads.run(run_id)
        live = [
            HoldView.of(lease, start=lease.since, end=None, cause="")
            for lease in coordinator.reads.leases()
            if lease.run == run_id
        ]
        return view_response(
            await asyncio.to_thread(
                read_timeline,
                runs_directory / run.id,
                steps,
                before,
                live,
                labels=labels,
                max_staleness=run.spec.get("algorithm", {}).get("max_staleness", 0),
            )
        )

    return routes
