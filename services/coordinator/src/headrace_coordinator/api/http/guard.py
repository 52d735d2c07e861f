"""ASGI middleware in front of every route: whose request it is, by the head alone; what was refused; what it took.

A caller bears a token, or without one is a user of this machine and no web page of another site. What a caller may do
the table says (`access.table`). Decides nothing about runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from math import ceil
from typing import TYPE_CHECKING

from headrace_servicekit.http_server import admit, guarded
from headrace_servicekit.rpc.addresses import parse_address
from headrace_servicekit.tracing import TRACEPARENT, is_tracing, span
from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.access.enforcement import ROW, RUN
from headrace_coordinator.access.login import BEGIN, END
from headrace_coordinator.access.tokens import Doors
from headrace_coordinator.api.http.errors import NO_HEAD, error_response
from headrace_coordinator.api.http.links import DOWNLOAD, Links
from headrace_coordinator.api.http.relay import Relay, is_relayed
from headrace_coordinator.api.http.routes.dashboard import is_page
from headrace_coordinator.api.http.tinker import KEY_PREFIX, PREFIX
from headrace_coordinator.domain.access import NOBODY, SYSTEM, Principal

if TYPE_CHECKING:
    from headrace_coordinator.access.issuer import Issuer
    from headrace_coordinator.app import Coordinator

OPEN_PATHS = frozenset({"/healthz", "/ca.pem", "/join", "/open", BEGIN, END})
"""/open takes a one-time code, /join a proof, the login's end a code of the issuer's."""
REFUSALS = frozenset({401, 403, 429})
"""Statuses that are written down whatever was asked."""
CHANGES = frozenset({"POST", "PATCH", "PUT", "DELETE"})
"""Requests with these methods begin a trace; others have a span in the trace of a caller that has one."""
REQUESTS = Counter(
    "headrace_http_requests", "HTTP requests by route and status", ["method", "route", "status"]
)
SECONDS = Histogram("headrace_http_request_seconds", "Seconds until an answer began", ["method", "route"])


class Guard:
    """Refuses who may not call, tells the routes who calls, and counts requests."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        coordinator: Coordinator,
        token: str | None,
        issuer: Issuer | None,
        links: Links,
        relay: Relay,
    ) -> None:
        self._app, self._links, self._relay = app, links, relay
        self._audit = coordinator.audit
        self._doors, self._quotas = Doors(coordinator.event_log, token, issuer), coordinator.quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuses or passes on, and counts either way."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        admitted = await self._admitted(scope)
        if isinstance(admitted, Principal) and admitted is not NOBODY:
            why, left = self._quotas.refused_s(admitted)
            if why:
                admitted = error_response("QUOTA", why)
                admitted.headers["Retry-After"] = str(ceil(left))
        refusal = admitted if isinstance(admitted, Response) else None
        caller = admitted if isinstance(admitted, Principal) else NOBODY
        CALLER.set(caller)
        sent = guarded(send, closing=refusal is not None)
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if route != "none" else "any"
                REQUESTS.labels(method, route, message["status"]).inc()
                SECONDS.labels(method, route).observe(time.perf_counter() - began)
            await sent(message)

        headers = Headers(scope=scope)
        try:
            with self._doors.open(caller):
                if is_tracing() and (scope["method"] in CHANGES or TRACEPARENT in headers):
                    with span(f"{scope['method']} {scope['path']}", headers.get(TRACEPARENT, "")):
                        await self._answer(scope, receive, counted, refusal)
                else:
                    await self._answer(scope, receive, counted, refusal)
        except asyncio.CancelledError:
            if not self._doors.was_cut():
                raise
            await _end(scope, receive, counted, started=status > 0)
        finally:
            self._write_down(scope, caller, status or 500, time.perf_counter() - began)

    def _write_down(self, scope: Scope, caller: Principal, status: int, seconds: float) -> None:
        """What the table wants to be known of a request that was answered, and every refusal."""
        row = scope.get(ROW)
        if status not in REFUSALS and (row is None or not row.audited):
            return
        self._audit.record(
            caller,
            scope["client"][0] if scope.get("client") else "",
            scope["method"] if row is not None else "any",
            getattr(scope.get("route"), "path", "none"),
            scope.get(RUN, ""),
            status,
            seconds,
        )

    async def _answer(self, scope: Scope, receive: Receive, send: Send, refusal: Response | None) -> None:
        if scope["method"] == "HEAD" and scope["path"] not in NO_HEAD:
            scope["method"] = "GET"
            await (refusal or self._app)(scope, receive, _without_body(send))
        else:
            await (refusal or self._app)(scope, receive, send)

    async def _admitted(self, scope: Scope) -> Principal | Response:
        """Who calls, or the refusal."""
        path = scope["path"]
        if path in OPEN_PATHS or (self._doors.asks and is_page(path)):
            return NOBODY
        if is_relayed(path):
            found = self._relay.refusal(scope) or SYSTEM
        else:
            found = await self._by_token(scope) if self._doors.asks else _from_here(scope)
        if isinstance(found, Principal):
            admit(scope)
        return found

    async def _by_token(self, scope: Scope) -> Principal | Response:
        """Who bears a token, or downloads with a code that was made for it."""
        headers, path = Headers(scope=scope), scope["path"]
        code = QueryParams(scope["query_string"]).get("code")
        if code and DOWNLOAD.fullmatch(path) and (made := self._links.redeem(code, path)):
            caller = await self._doors.caller(made)
            if caller is not None:
                return caller
        form = "Authorization: Bearer TOKEN"
        if path.startswith(f"{PREFIX}/"):
            form, scheme = f"X-API-Key: {KEY_PREFIX}TOKEN", "bearer"
            given = headers.get("x-api-key", "").removeprefix(KEY_PREFIX)
        else:
            scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip()
        caller = await self._doors.caller(given) if given and scheme.lower() == "bearer" else None
        if caller is not None:
            return caller
        wrong = "wrong, revoked or expired" if given else "missing"
        return error_response("UNAUTHENTICATED", f"the API token is {wrong}; send {form}")


def _from_here(scope: Scope) -> Principal | Response:
    """Where there is no token: the refusal of requests that other machines or other sites' pages make."""
    headers = Headers(scope=scope)
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_here(host):
        # A web page elsewhere whose name was re-pointed at this machine (DNS rebinding).
        message = f"without an API token only this machine may call, not by the name {host[:80]!r}"
        return error_response("FORBIDDEN", message + "; use 127.0.0.1, or give the coordinator a token")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return error_response("FORBIDDEN", f"web pages of {origin[:80]!r} may not call this API")
    return SYSTEM


async def _end(scope: Scope, receive: Receive, send: Send, *, started: bool) -> None:
    """Ends an answer whose caller's token has ended: an event stream in order, a download before its length."""
    if not started:
        refusal = error_response("UNAUTHENTICATED", "the API token was revoked, or has expired")
        await refusal(scope, receive, send)
        return
    with contextlib.suppress(
        RuntimeError
    ):  # of the server, for a length that was announced: it ends the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
