"""One-time links to the dashboard: who has the token gets a code, and a browser that shows it gets the token.

The token itself stands in no address that a process list or a server's log could show. Knows no run.
"""

from __future__ import annotations

import hmac
import secrets
import time
from urllib.parse import quote

from fastapi import APIRouter, Depends, Response
from headrace_schema.resources.views import LinkView

from headrace_coordinator.api.http.errors import error_response
from headrace_coordinator.api.http.requests import known_parameters, view_response

LIFE_S = 60.0
MAX_LINKS = 32  # a newer link replaces the oldest


class Links:
    """Codes that are good once and for `LIFE_S` seconds."""

    def __init__(self) -> None:
        self._expiries: dict[str, float] = {}

    def make(self) -> str:
        """A new code."""
        if len(self._expiries) >= MAX_LINKS:
            self._expiries.pop(next(iter(self._expiries)))
        code = secrets.token_urlsafe(24)
        self._expiries[code] = time.monotonic() + LIFE_S
        return code

    def redeem(self, code: str) -> bool:
        """Whether the code is good; it is used up."""
        found = [known for known in self._expiries if hmac.compare_digest(known.encode(), code.encode())]
        return bool(found) and self._expiries.pop(found[0]) > time.monotonic()


def link_routes(token: str | None) -> APIRouter:
    """Makes and follows links; without a token a link is the dashboard's plain address."""
    routes = APIRouter(tags=["service"], dependencies=[Depends(known_parameters)])
    links = Links()

    @routes.post("/v1/links", response_model=LinkView, status_code=201)
    async def create_link() -> Response:
        """A path that opens the dashboard, once, in a browser that does not have the token."""
        path = f"/open?code={links.make()}" if token else "/"
        response = view_response(LinkView(path=path, expires_in_s=LIFE_S))
        response.status_code = 201
        return response

    @routes.get("/open", response_class=Response, status_code=303)
    async def open_link(code: str = "") -> Response:
        """Leads to `/#token=…`. A fragment is sent to no server. Needs no token."""
        if token and not links.redeem(code):
            return error_response(
                "UNAUTHENTICATED", "this link was used or has expired; `headrace open` makes a new one"
            )
        where = f"/#token={quote(token, safe='')}" if token else "/"
        headers = {"Location": where, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        return Response(status_code=303, headers=headers)

    return routes
