"""The routes under /v1/sessions over gRPC (`SessionService`). Decides nothing.

Each RPC goes through the HTTP app as a request of the route that has its name: who may call, quotas, the audit and
refusals are HTTP's own.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import grpc
import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute
from headrace.sessions.v1 import sessions_pb2 as pb
from headrace_schema.resources.views import ErrorView
from headrace_servicekit.rpc.addresses import split_address
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.tracing import TRACEPARENT

from headrace_coordinator.access.tokens import Doors
from headrace_coordinator.api.http.requests import JSON
from headrace_coordinator.api.http.routes.sessions import session_routes

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

SERVICE = pb.DESCRIPTOR.services_by_name["SessionService"]
CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
FORWARDED = ("authorization", TRACEPARENT)
LIST = "ListSessions"


class SessionServicer:
    """Has a method for each RPC of the service."""

    def __init__(self, app: FastAPI, coordinator: Coordinator, doors: Doors) -> None:
        self._app, self._doors = app, doors
        routes = (each for each in session_routes(coordinator).routes if isinstance(each, APIRoute))
        self._paths = {route.name: (next(iter(route.methods or ())), route.path) for route in routes}

    def __getattr__(self, rpc: str) -> Callable[[Any, Any], Awaitable[Any]]:
        if rpc not in SERVICE.methods_by_name:
            raise AttributeError(rpc)
        return partial(self._answer, rpc)

    async def refusal(self, context: Any) -> ServiceError | None:
        """Why the caller of a context may not call anything, in HTTP's words; None where it shows a good token."""
        shown = dict(context.invocation_metadata() or ()).get("authorization", "")
        scheme, _, token = shown.partition(" ") if isinstance(shown, str) else ("", "", "")
        if not self._doors.asks:
            return None
        if scheme.lower() == "bearer" and token.strip() and await self._doors.caller(token.strip()):
            return None
        answer = await self._ask(LIST, pb.ListSessionsRequest(), context)
        return _refusal(answer) if answer.is_error else None

    async def _answer(self, rpc: str, request: Any, context: Any) -> Any:
        answer = await self._ask(rpc, request, context)
        if answer.is_error:
            raise _refusal(answer)
        return getattr(pb, f"{rpc}Response")(body=answer.text)

    async def _ask(self, rpc: str, request: Any, context: Any) -> httpx.Response:
        method, path = self._paths[re.sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower()]
        given = {field.name: value for field, value in request.ListFields()}
        body, key = given.pop("body", ""), given.pop("key", "")
        for name in re.findall(r"\{(\w+)\}", path):
            if not (value := given.pop(name, "")):
                message = (
                    f"{name}: is missing; every request about a session names its run's id, as `session`"
                )
                raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message, key=name)
            path = path.replace(f"{{{name}}}", quote(value, safe=""))
        headers = [(name, value) for name, value in context.invocation_metadata() or () if name in FORWARDED]
        headers += [("content-type", JSON)] if method == "POST" else []
        headers += [("idempotency-key", key.encode())] if key else []
        asked = httpx.Request(
            method,
            f"http://localhost{path}",
            params={
                name: value if isinstance(value, float) else list(value) for name, value in given.items()
            },
            headers=headers,
            content=body.encode(),
        )
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False, client=_peer(context))
        answer = await transport.handle_async_request(asked)
        await answer.aread()
        return answer


def _peer(context: Any) -> tuple[str, int]:
    """Address and port of the caller."""
    host, port = split_address(unquote(context.peer().partition(":")[2]))
    return host, int(port)


def _refusal(answer: httpx.Response) -> ServiceError:
    """HTTP's refusal, with the key that is wrong and the fix."""
    view = ErrorView.model_validate_json(answer.content)
    message = "\n".join(
        [view.message, *(f"{each.key}: {each.problem}; {each.fix}" for each in view.problems)]
    )
    about = {"key": view.problems[0].key, "fix": view.problems[0].fix} if view.problems else {}
    if after := answer.headers.get("retry-after"):
        about["retry_after_s"] = after
    code = CODES.get(answer.status_code, grpc.StatusCode.INTERNAL)
    return ServiceError(code, view.reason, message, **about)
