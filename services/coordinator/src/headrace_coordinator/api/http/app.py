"""Puts the HTTP API together: routes, errors, description, and who may call. Decides nothing about runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from headrace_planner.documents import PlanRequest
from headrace_schema.access import QuotaRequest, TokenRequest
from headrace_schema.changing import RunChange, RunLabels
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.spec import RunSpec
from pydantic.json_schema import models_json_schema

from headrace_coordinator.access.enforcement import Enforcement
from headrace_coordinator.access.issuer import Issuer
from headrace_coordinator.access.login import Login
from headrace_coordinator.access.table import OPEN, TABLE
from headrace_coordinator.api.http.errors import ANSWERS, add_error_handlers
from headrace_coordinator.api.http.guard import Guard
from headrace_coordinator.api.http.links import Links, link_routes, login_routes
from headrace_coordinator.api.http.relay import Relay
from headrace_coordinator.api.http.routes.access import access_routes
from headrace_coordinator.api.http.routes.dashboard import page_routes
from headrace_coordinator.api.http.routes.evaluations import evaluation_routes
from headrace_coordinator.api.http.routes.events import event_routes
from headrace_coordinator.api.http.routes.fleet import DeviceRelease, ScaleRequest, fleet_routes
from headrace_coordinator.api.http.routes.overviews import overview_routes
from headrace_coordinator.api.http.routes.recordings import (
    demonstration_routes,
    recording_routes,
    video_routes,
)
from headrace_coordinator.api.http.routes.runs import run_routes
from headrace_coordinator.api.http.routes.service import plan_routes, service_routes
from headrace_coordinator.api.http.routes.sessions import CallRequest, SamplesRequest, session_routes
from headrace_coordinator.api.http.tinker.routes import tinker_routes
from headrace_coordinator.api.http.tinker.service import Tinker

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

VERSION = "1"
HEARTBEAT_S = 10.0
REFERENCE = "#/components/schemas/{model}"
BEARER = "token"
TOKEN_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token of `headrace token create`, one of the fleet's OpenID Connect issuer, or the API's own, "
    "which is the admin's: `http-token` in the data directory of `headrace up`, the volume or secret of the same "
    "name in containers. The scope that a route needs stands beside it. A coordinator that was started with "
    "--no-token asks for none.",
}


def make_app(
    coordinator: Coordinator,
    *,
    runs_directory: Path,
    token: str | None = None,
    issuer: Issuer | None = None,
    heartbeat_s: float = HEARTBEAT_S,
    tinker_models: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> FastAPI:
    """The API of a coordinator; trajectories are read from `runs_directory`/RUN, logs from the `logs` beside it.

    With a `token` every request but /healthz and those for the dashboard's files must bear it, one that an admin made,
    or one of the `issuer`. Without one, only requests that name this machine by an address or as localhost, and that
    come from no other site's web page, are answered.

    `tinker_models`: specs of the models that clients of Tinker ask for by name.
    """
    app = FastAPI(
        title="Headrace coordinator",
        version=VERSION,
        responses=ANSWERS,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(Enforcement(coordinator))],
        generate_unique_id_function=lambda route: route.name,
    )

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return app.openapi()

    relay = Relay(coordinator)
    app.router.routes.append(relay.route)
    app.include_router(run_routes(coordinator, runs_directory))
    app.include_router(session_routes(coordinator))
    app.include_router(recording_routes(coordinator))
    app.include_router(demonstration_routes(coordinator))
    app.include_router(event_routes(coordinator, heartbeat_s))
    app.include_router(evaluation_routes(coordinator))
    for kind in ("runs", "evaluations"):
        app.include_router(video_routes(coordinator, kind))
    app.include_router(overview_routes(coordinator, runs_directory))
    app.include_router(fleet_routes(coordinator, runs_directory.parent / "logs"))
    login = Login(issuer) if issuer and issuer.config.client_id else None
    app.include_router(service_routes(coordinator, login=login is not None))
    app.include_router(access_routes(coordinator))
    links = Links()
    app.include_router(link_routes(links, asks=bool(token)))
    app.include_router(login_routes(login))
    app.include_router(page_routes())
    app.include_router(plan_routes())
    app.include_router(tinker_routes(Tinker(coordinator, tinker_models)))
    app.add_middleware(Guard, coordinator=coordinator, token=token, issuer=issuer, links=links, relay=relay)
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
                for model in (
                    RunSpec,
                    RunChange,
                    RunLabels,
                    EvaluationSpec,
                    ScaleRequest,
                    DeviceRelease,
                    PlanRequest,
                    TokenRequest,
                    QuotaRequest,
                    CallRequest,
                    SamplesRequest,
                )
            ],
            ref_template=REFERENCE,
        )
        components = schema["components"]["schemas"]
        components |= bodies["$defs"]
        schema["components"]["schemas"] = dict(sorted(components.items()))
        for operation in (each for methods in schema["paths"].values() for each in methods.values()):
            for parameter in operation.get("parameters", []):
                parameter["schema"] = _without_null(parameter["schema"])
            row = TABLE.get(operation["operationId"], OPEN)
            operation["security"] = [{BEARER: [row.scope]}] if row.scope else []
        schema["components"]["securitySchemes"] = {BEARER: TOKEN_SCHEME}
        schema["security"] = [{BEARER: []}]
        app.openapi_schema = schema
    return app.openapi_schema


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema: one that is absent is left out, and none is sent as null."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    only: dict[str, Any] = kinds[0]
    return only | {name: value for name, value in schema.items() if name != "anyOf"}
