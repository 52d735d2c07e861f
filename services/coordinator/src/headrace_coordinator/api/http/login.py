"""The page's login at the fleet's issuer. Decides nothing; see `access.login`."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from headrace_coordinator.access.login import BEGIN, COOKIE, END, LIFE_S, Login, LoginRefused
from headrace_coordinator.api.http.errors import error_response

_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


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
        response = Response(status_code=303, headers={"Location": url, **_HEADERS})
        secure = request.url.scheme == "https"
        response.set_cookie(
            COOKIE, cookie, max_age=LIFE_S, path=BEGIN, secure=secure, httponly=True, samesite="lax"
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
            response = Response(status_code=303, headers={"Location": where, **_HEADERS})
        response.delete_cookie(COOKIE, path=BEGIN)
        return response

    return routes


def _none() -> Response:
    return error_response(
        "NOT_FOUND", "this fleet logs nobody in; give its --oidc file a client_id (docs/security.md)"
    )
