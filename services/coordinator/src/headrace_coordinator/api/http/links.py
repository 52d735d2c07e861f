"""How a browser comes to a token: one-time links to the dashboard and to downloads, and a login at the fleet's issuer.

Who has a token gets a code, and a browser that shows the code has the token for one request: the token itself stands in
no address that a process list or a server's log could show. Knows no run; `access.login` decides about logins.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from headrace_schema.resources.views import LinkView

from headrace_coordinator.access.login import BEGIN, COOKIE, END, Login, LoginRefused
from headrace_coordinator.access.login import LIFE_S as LOGIN_S
from headrace_coordinator.api.http.errors import error_response
from headrace_coordinator.api.http.requests import known_parameters, view_response

OPEN = "/open"
DOWNLOAD = re.compile(r"/v1/runs/[^/?#]+/(?:export|checkpoints/[^?#]+)")
LIFE_S = 60.0
MAX_LINKS = 32  # a newer link replaces the oldest
UNSHOWN = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


class Links:
    """Codes that are good once, for one path and for `LIFE_S` seconds, each in place of a token."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[str, str, float]] = {}

    def make(self, path: str, token: str) -> str:
        """A new code for a path."""
        if len(self._links) >= MAX_LINKS:
            self._links.pop(next(iter(self._links)))
        code = secrets.token_urlsafe(24)
        self._links[code] = (path, token, time.monotonic() + LIFE_S)
        return code

    def redeem(self, code: str, path: str) -> str:
        """The token that a code stands for, empty unless it is good for a path; it is used up."""
        found = [known for known in self._links if hmac.compare_digest(known.encode(), code.encode())]
        target, token, expiry = self._links.pop(found[0]) if found else ("", "", 0.0)
        return token if target == path and expiry > time.monotonic() else ""


def link_routes(links: Links, *, asks: bool) -> APIRouter:
    """Makes and follows links; where no token is asked for (`asks`), a link is the plain address."""
    routes = APIRouter(tags=["service"], dependencies=[Depends(known_parameters)])

    @routes.post("/v1/links", response_model=LinkView, status_code=201)
    async def create_link(
        request: Request,
        download: Annotated[str, Query(pattern=f"^({DOWNLOAD.pattern})?$")] = "",
    ) -> Response:
        """A path that opens the dashboard, or a download, once, in a browser that does not show the token."""
        token = request.headers.get("authorization", "").partition(" ")[2].strip()
        made = f"{download or OPEN}?code={links.make(download or OPEN, token)}" if asks else ""
        path = made or download or "/"
        response = view_response(LinkView(path=path, expires_in_s=LIFE_S))
        response.status_code = 201
        return response

    @routes.get(OPEN, response_class=Response, status_code=303)
    async def open_link(code: str = "", run: str = "") -> Response:
        """Leads to `/#token=…`, or to the page of a run. A fragment is sent to no server. Needs no token."""
        token = links.redeem(code, OPEN) if asks else ""
        if asks and not token:
            return error_response(
                "UNAUTHENTICATED", "this link was used or has expired; `headrace open` makes a new one"
            )
        parts = [f"token={quote(token, safe='')}"] if token else []
        parts += [f"/runs/{quote(run, safe='')}"] if run else []
        where = "/#" + "&".join(parts) if parts else "/"
        headers = {"Location": where, **UNSHOWN}
        return Response(status_code=303, headers=headers)

    return routes


def login_routes(login: Login | None) -> APIRouter:
    """Without a `login` they are not there."""
    routes = APIRouter(tags=["service"])

    @routes.get(BEGIN, response_class=Response, status_code=303)
    async def begin_login(request: Request) -> Response:
        """Leads a browser to the fleet's issuer. Needs no token."""
        if login is None:
            return _none()
        try:
            url, cookie = await login.begin(str(request.base_url))
        except LoginRefused as refused:
            return error_response("UNAVAILABLE", str(refused))
        response = Response(status_code=303, headers={"Location": url, **UNSHOWN})
        secure = request.url.scheme == "https"
        response.set_cookie(
            COOKIE, cookie, max_age=LOGIN_S, path=BEGIN, secure=secure, httponly=True, samesite="lax"
        )
        return response

    @routes.get(END, response_class=Response, status_code=303)
    async def end_login(request: Request) -> Response:
        """Takes what the issuer's redirect brought, and leads to `/#token=…`. Needs no token."""
        if login is None:
            return _none()
        try:
            token = await login.finish(
                str(request.base_url), request.cookies.get(COOKIE, ""), request.query_params
            )
        except LoginRefused as refused:
            response: Response = error_response("UNAUTHENTICATED", str(refused))
        else:
            where = f"/#token={quote(token, safe='')}"
            response = Response(status_code=303, headers={"Location": where, **UNSHOWN})
        response.delete_cookie(COOKIE, path=BEGIN)
        return response

    return routes


def _none() -> Response:
    return error_response(
        "NOT_FOUND", "this fleet logs nobody in; give its --oidc file a client_id (docs/security.md)"
    )
