"""Puts the HTTP API together: routes, errors, guard, description. Decides nothing about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from headrace_planner.documents import PlanRequest
from headrace_schema.changing import RunChange
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.spec import RunSpec
from pydantic.json_schema import models_json_schema

from headrace_coordinator.api.control import Control
from headrace_coordinator.api.http.errors import ANSWERS, add_error_handlers
from headrace_coordinator.api.http.guard import Guard
from headrace_coordinator.api.http.links import link_routes
from headrace_coordinator.api.http.routes.evaluations import evaluation_routes
from headrace_coordinator.api.http.routes.fleet import ScaleRequest, fleet_routes, service_routes
from headrace_coordinator.api.http.routes.overviews import overview_routes
from headrace_coordinator.api.http.routes.pages import page_routes
from headrace_coordinator.api.http.routes.plans import plan_routes
from headrace_coordinator.api.http.routes.runs import run_routes

VERSION = "1"
HEARTBEAT_S = 10.0
REFERENCE = "#/components/schemas/{model}"


def make_app(
    control: Control, *, runs_directory: Path, token: str | None = None, heartbeat_s: float = HEARTBEAT_S
) -> FastAPI:
    """The API over `control`; trajectories are read from `runs_directory`/RUN, logs from the `logs` beside it.

    With a `token` every request but /healthz and those for the dashboard's files must bear it. Without one, only
    requests that name this machine by an address or as localhost, and that come from no other site's web page, are
    answered.
    """
    app = FastAPI(
        title="Headrace coordinator",
        version=VERSION,
        responses=ANSWERS,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.include_router(run_routes(control, runs_directory, heartbeat_s))
    app.include_router(evaluation_routes(control))
    app.include_router(overview_routes(control, runs_directory))
    app.include_router(fleet_routes(control, runs_directory.parent / "logs"))
    app.include_router(service_routes(control))
    app.include_router(link_routes(token))
    app.include_router(page_routes())
    app.include_router(plan_routes())
    app.add_middleware(Guard, token=token)
    add_error_handlers(app)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def describe(app: FastAPI) -> dict[str, Any]:
    """The API's OpenAPI description, with the bodies that routes read themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, bodies = models_json_schema(
            [
                (model, "validation")
                for model in (RunSpec, RunChange, EvaluationSpec, ScaleRequest, PlanRequest)
            ],
            ref_template=REFERENCE,
        )
        components = schema["components"]["schemas"]
        components |= bodies["$defs"]
        schema["components"]["schemas"] = dict(sorted(components.items()))
        for operation in (each for methods in schema["paths"].values() for each in methods.values()):
            for parameter in operation.get("parameters", []):
                parameter["schema"] = _without_null(parameter["schema"])
        app.openapi_schema = schema
    return app.openapi_schema


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema: one that is absent is left out, and none is sent as null."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    only: dict[str, Any] = kinds[0]
    return only | {name: value for name, value in schema.items() if name != "anyOf"}
