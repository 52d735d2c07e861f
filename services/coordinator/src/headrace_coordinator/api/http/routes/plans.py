"""Route of plans: a dry run that places nothing and reads no state."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request
from headrace_planner import PlanError
from headrace_planner.documents import PlanRequest
from headrace_planner.explaining import explain
from headrace_schema.problems import problem

from headrace_coordinator.api.control import Refused
from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.http.requests import known_parameters, read_model

PLAN_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/PlanRequest"}}},
    }
}


def plan_routes() -> APIRouter:
    """The route of plans. One search runs at a time; it takes a core for seconds."""
    routes = APIRouter(prefix="/v1", tags=["plans"], dependencies=[Depends(known_parameters)])
    searching = asyncio.Lock()

    @routes.post("/plans", response_model=dict[str, Any], openapi_extra=PLAN_BODY)
    async def predict_plan(request: Request) -> dict[str, Any]:
        """Predicts the fastest use of devices for a workflow and its profiles, and explains it. Starts nothing."""
        wanted = await read_model(request, PlanRequest, "the request for a plan")
        if searching.locked():
            raise Refused("UNAVAILABLE", "another plan is being searched for; try again")
        async with searching:
            try:
                return await asyncio.to_thread(explain, wanted)
            except PlanError as error:
                found = [problem(item.key, item.problem, item.fix) for item in error.problems]
                raise invalid(found, "the request for a plan") from error

    return routes
