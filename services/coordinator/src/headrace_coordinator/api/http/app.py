"""Puts the HTTP API together: routes, errors, description, and who may call.

A caller bears a token, or without one is a user of this machine and no web page of another site. Decides nothing about
runs.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from headrace_planner.documents import PlanRequest
from headrace_schema.changing import RunChange, RunLabels
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.sessions import Sample
from headrace_schema.spec import RunSpec
from headrace_servicekit.http_server import admit, guarded
from headrace_servicekit.rpc.addresses import parse_address
from headrace_servicekit.tracing import TRACEPARENT, is_tracing, span
from prometheus_client import Counter, Histogram
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_coordinator.api.http.errors import ANSWERS, NO_HEAD, add_error_handlers, error_response
from headrace_coordinator.api.http.relay import Relay, is_relayed
from headrace_coordinator.api.http.routes.dashboard import DOWNLOAD, Links, is_page, link_routes, page_routes
from headrace_coordinator.api.http.routes.evaluations import evaluation_routes
from headrace_coordinator.api.http.routes.events import event_routes
from headrace_coordinator.api.http.routes.fleet import DeviceRelease, ScaleRequest, fleet_routes
from headrace_coordinator.api.http.routes.overviews import overview_routes
from headrace_coordinator.api.http.routes.recordings import recording_routes, video_routes
from headrace_coordinator.api.http.routes.runs import run_routes
from headrace_coordinator.api.http.routes.service import plan_routes, service_routes
from headrace_coordinator.api.http.routes.sessions import CallRequest, session_routes
from headrace_coordinator.api.http.tinker import KEY_PREFIX, PREFIX
from headrace_coordinator.api.http.tinker.routes import tinker_routes
from headrace_coordinator.api.http.tinker.service import Tinker
from headrace_coordinator.api.idempotency import CALLER

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

VERSION = "1"
HEARTBEAT_S = 10.0
REFERENCE = "#/components/schemas/{model}"
OPEN_PATHS = frozenset({"/healthz", "/ca.pem", "/open"})  # /open takes a one-time code
BEARER = "token"
TOKEN_SCHEME = {
    "type": "http",
    "scheme": "bearer",
    "description": "The API's token: `http-token` in the data directory of `headrace up`, the volume or secret of "
    "the same name in containers. A coordinator that was started with --no-token asks for none.",
}
CHANGES = frozenset({"POST", "PATCH", "PUT", "DELETE"})
"""Requests with these methods begin a trace; others have a span in the trace of a caller that has one."""
REQUESTS = Counter(
    "headrace_http_requests", "HTTP requests by route and status", ["method", "route", "status"]
)
SECONDS = Histogram("headrace_http_request_seconds", "Seconds until an answer began", ["method", "route"])


def make_app(
    coordinator: Coordinator,
    *,
    runs_directory: Path,
    token: str | None = None,
    heartbeat_s: float = HEARTBEAT_S,
    tinker_models: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> FastAPI:
    """The API of a coordinator; trajectories are read from `runs_directory`/RUN, logs from the `logs` beside it.

    `tinker_models`: specs of the models that clients of Tinker ask for by name.

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
    relay = Relay(coordinator)
    app.router.routes.append(relay.route)
    app.include_router(run_routes(coordinator, runs_directory))
    app.include_router(session_routes(coordinator))
    app.include_router(recording_routes(coordinator))
    app.include_router(event_routes(coordinator, heartbeat_s))
    app.include_router(evaluation_routes(coordinator))
    for kind in ("runs", "evaluations"):
        app.include_router(video_routes(coordinator, kind))
    app.include_router(overview_routes(coordinator, runs_directory))
    app.include_router(fleet_routes(coordinator, runs_directory.parent / "logs"))
    app.include_router(service_routes(coordinator))
    links = Links()
    app.include_router(link_routes(token, links))
    app.include_router(page_routes())
    app.include_router(plan_routes())
    app.include_router(tinker_routes(Tinker(coordinator.sessions, coordinator.reads.run, tinker_models)))
    app.add_middleware(Guard, token=token, links=links, relay=relay)
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
                    CallRequest,
                    Sample,
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
        schema["components"]["securitySchemes"] = {BEARER: TOKEN_SCHEME}
        schema["security"] = [{BEARER: []}]
        for path in OPEN_PATHS & schema["paths"].keys():
            for operation in schema["paths"][path].values():
                operation["security"] = []
        app.openapi_schema = schema
    return app.openapi_schema


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema: one that is absent is left out, and none is sent as null."""
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) != 1:
        return schema
    only: dict[str, Any] = kinds[0]
    return only | {name: value for name, value in schema.items() if name != "anyOf"}


class Guard:
    """ASGI middleware in front of every route: refuses who may not call, by the head alone, and counts requests."""

    def __init__(self, app: ASGIApp, token: str | None, links: Links, relay: Relay) -> None:
        self._app, self._links, self._relay = app, links, relay
        self._token = token.encode() if token else None
        self._caller = hashlib.sha256(b"caller/" + self._token).hexdigest()[:12] if self._token else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses or passes on, and counts either way."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        refusal = self._refusal(scope)
        sent = guarded(send, closing=refusal is not None)

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if route != "none" else "any"
                REQUESTS.labels(method, route, message["status"]).inc()
                SECONDS.labels(method, route).observe(time.perf_counter() - began)
            await sent(message)

        headers = Headers(scope=scope)
        if is_tracing() and (scope["method"] in CHANGES or TRACEPARENT in headers):
            with span(f"{scope['method']} {scope['path']}", headers.get(TRACEPARENT, "")):
                await self._answer(scope, receive, counted, refusal)
        else:
            await self._answer(scope, receive, counted, refusal)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, refusal: Response | None) -> None:
        if scope["method"] == "HEAD" and scope["path"] not in NO_HEAD:
            scope["method"] = "GET"
            await (refusal or self._app)(scope, receive, _without_body(send))
        else:
            await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        path = scope["path"]
        if path in OPEN_PATHS or (self._token is not None and is_page(path)):
            return None
        refusal = self._by_token(scope) if self._token is not None else _from_elsewhere(scope)
        if refusal is None and is_relayed(path):
            refusal = self._relay.refusal(scope)
        if refusal is None:
            CALLER.set(self._caller)
            admit(scope)
        return refusal

    def _by_token(self, scope: Scope) -> Response | None:
        """Refuses requests without the token, except those to an endpoint (with a key) and downloads with a code."""
        headers, path = Headers(scope=scope), scope["path"]
        code = QueryParams(scope["query_string"]).get("code")
        if is_relayed(path) or (code and DOWNLOAD.fullmatch(path) and self._links.redeem(code, path)):
            return None
        if path.startswith(f"{PREFIX}/"):
            scheme, given = "bearer", headers.get("x-api-key", "").removeprefix(KEY_PREFIX)
            form = f"X-API-Key: {KEY_PREFIX}TOKEN"
        else:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            form = "Authorization: Bearer TOKEN"
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token or b""):
            return None
        wrong = "wrong" if given else "missing"
        return error_response("UNAUTHENTICATED", f"the API token is {wrong}; send {form}")


def _from_elsewhere(scope: Scope) -> Response | None:
    """The refusal of requests that other machines or other sites' pages make, where there is no token."""
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_here(host):
        # A web page elsewhere whose name was re-pointed at this machine (DNS rebinding).
        message = f"without an API token only this machine may call, not by the name {host[:80]!r}"
        return error_response("FORBIDDEN", message + "; use 127.0.0.1, or give the coordinator a token")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return error_response("FORBIDDEN", f"web pages of {origin[:80]!r} may not call this API")
    return None


def _without_body(send: Send) -> Send:
    """Ends the answer after its headers, which also ends a stream."""

    async def headers_only(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return headers_only


def _is_here(host: str) -> bool:
    """Whether a Host header is an address or a name that can only mean this machine."""
    found = parse_address(host, default_port=0)
    if found is None:
        return False
    name = found[0].lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
