"""Every refusal as an ErrorView: a reason, a sentence, and the keys to change. Never a traceback."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from headrace_schema.problems import explain_details, first_of, nearest, problem
from headrace_schema.resources.views import ErrorView, KeyProblemView
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.aside import TooSlow

log = logging.getLogger(__name__)
STATUS = {
    "INVALID": 422,
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "UNAUTHENTICATED": 401,
    "FORBIDDEN": 403,
    "TOO_SLOW": 408,
    "TOO_LARGE": 413,
    "UNSUPPORTED_MEDIA_TYPE": 415,
    "QUOTA": 429,
}
NO_HEAD = frozenset({"/open"})  # a preview of a link must not use it up
CONFLICT = 409  # Any other reason is about the state of the thing, such as pausing a run that has ended.
HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}
# What routes may answer beside their own view; the API's description lists them.
ANSWERS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorView, "description": "The bearer token is missing, wrong, revoked or expired."},
    403: {
        "model": ErrorView,
        "description": "The caller lacks the route's scope, or the run is another's. Without an API token: the request "
        "does not come to this machine, or from its own pages.",
    },
    404: {"model": ErrorView, "description": "There is no such thing; the message names the nearest one."},
    405: {"model": ErrorView, "description": "The path has other methods; the header Allow names them."},
    408: {"model": ErrorView, "description": "The body came too slowly; the connection is ended."},
    409: {
        "model": ErrorView,
        "description": "The thing's state, or an earlier use of the key, does not allow it.",
    },
    413: {"model": ErrorView, "description": "The body is too large."},
    415: {"model": ErrorView, "description": "The body is neither application/json nor application/yaml."},
    422: {"model": ErrorView, "description": "The request is wrong; problems name the keys and the fixes."},
    429: {
        "model": ErrorView,
        "description": "A quota is used up; the message says which, and when it frees.",
    },
    503: {"model": ErrorView, "description": "Not possible at the moment; try again."},
}


class _Parameters(BaseModel):
    """Parameters have no nested keys to look among."""


def error_response(
    reason: str, message: str, problems: Sequence[KeyProblemView] = (), status: int = 0
) -> Response:
    """An ErrorView with the status of its reason."""
    status = status or STATUS.get(reason, CONFLICT)
    body = ErrorView(reason=reason, message=message, problems=first_of(problems)).model_dump_json()
    return Response(body, status, HEADERS.get(status), "application/json")


def invalid(problems: list[KeyProblemView], what: str = "the request") -> Refused:
    """A refusal that names what is wrong with a request."""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return Refused("INVALID", f"{what} has {count}", problems)


def add_error_handlers(app: FastAPI) -> None:
    """Makes every error of the app an ErrorView."""

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> Response:
        return error_response(error.reason, error.message, error.problems)

    @app.exception_handler(TooSlow)
    async def slow(_: Request, error: TooSlow) -> Response:
        return error_response("UNAVAILABLE", f"{error}; ask for less, or try again")

    @app.exception_handler(RequestValidationError)
    async def parameters(_: Request, error: RequestValidationError) -> Response:
        details: Any = [{**detail, "loc": detail["loc"][1:]} for detail in error.errors()]
        refusal = invalid(explain_details(details, _Parameters))
        return error_response(refusal.reason, refusal.message, refusal.problems)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        reason = {404: "NOT_FOUND", 405: "METHOD_NOT_ALLOWED"}.get(error.status_code, "INVALID")
        response = error_response(reason, _no_route(app, request), status=error.status_code)
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_allowed(app, request.url.path)) or "GET, HEAD"
        return response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed: %r", request.method, request.url.path, error)
        return error_response("INTERNAL", "a bug in the coordinator; its log has the details", status=500)


def _allowed(app: FastAPI, path: str) -> list[str]:
    """Methods of every described route on a path. Starlette names those of the first route alone."""
    found = {
        method.upper()
        for template, methods in app.openapi()["paths"].items()
        if compile_path(template)[0].match(path)
        for method in methods
    }
    return sorted(found | ({"HEAD"} if "GET" in found and path not in NO_HEAD else set()))


def _no_route(app: FastAPI, request: Request) -> str:
    asked = f"{request.method} {request.url.path}"
    routes = [f"{method} {path}" for path, methods in app.openapi()["paths"].items() for method in methods]
    close = nearest(asked, [f"{route.split()[0].upper()} {route.split()[1]}" for route in routes])
    return f"there is no {asked[:200]}; " + (
        f"did you mean {close}?" if close else "GET /openapi.json lists what there is"
    )


def unknown_parameter(name: str, known: Sequence[str]) -> KeyProblemView:
    """A query parameter that a route does not have."""
    close = nearest(name, known)
    listed = ", ".join(sorted(known)) or "none"
    return problem(
        name, "unknown query parameter", f"did you mean {close}?" if close else f"parameters here: {listed}"
    )
