"""Who may call: a bearer token, or without one only this machine's own users and not its web pages.

Also counts requests. Knows no route.
"""

from __future__ import annotations

import hmac
import ipaddress
import time

from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_coordinator.api.http.errors import NO_HEAD, error_response
from headrace_coordinator.api.http.routes.pages import is_page

OPEN_PATHS = frozenset({"/healthz", "/open"})  # /open takes a one-time code
REQUESTS = Counter(
    "headrace_http_requests", "HTTP requests by route and status", ["method", "route", "status"]
)
SECONDS = Histogram("headrace_http_request_seconds", "Seconds until an answer began", ["method", "route"])


class Guard:
    """ASGI middleware in front of every route."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token.encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses or passes on, and counts either way."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if route != "none" else "any"
                REQUESTS.labels(method, route, message["status"]).inc()
                SECONDS.labels(method, route).observe(time.perf_counter() - began)
            await send(message)

        refusal = self._refusal(scope)
        if scope["method"] == "HEAD" and scope["path"] not in NO_HEAD:
            scope["method"] = "GET"
            await (refusal or self._app)(scope, receive, _without_body(counted))
        else:
            await (refusal or self._app)(scope, receive, counted)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        path = scope["path"]
        if path in OPEN_PATHS or (self._token is not None and is_page(path)):
            return None
        if self._token is not None:
            return self._without_token(headers)
        host = headers.get("host", "")
        if not _is_here(host):
            # A web page elsewhere whose name was re-pointed at this machine (DNS rebinding).
            message = f"without an API token only this machine may call, not by the name {host[:80]!r}"
            return error_response("FORBIDDEN", message + "; use 127.0.0.1, or give the coordinator a token")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return error_response("FORBIDDEN", f"web pages of {origin[:80]!r} may not call this API")
        return None

    def _without_token(self, headers: Headers) -> Response | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._token or b""):
            return None
        wrong = "wrong" if given else "missing"
        return error_response(
            "UNAUTHENTICATED", f"the API token is {wrong}; send Authorization: Bearer TOKEN"
        )


def _without_body(send: Send) -> Send:
    """Ends the answer after its headers, which also ends a stream."""

    async def headers_only(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return headers_only


def _is_here(host: str) -> bool:
    """Whether a Host header is an address or a name that can only mean this machine."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.strip("[]").lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
