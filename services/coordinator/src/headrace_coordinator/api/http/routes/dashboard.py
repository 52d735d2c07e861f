"""The files of the dashboard and of /docs, and one-time links to the dashboard and to downloads.

Files are read once and served with a policy under which nothing else runs. They hold no data, so they need no token;
what they show they ask of the API, with the user's token. Who has the token gets a code, and a browser that shows the
code gets the token: the token itself stands in no address that a process list or a server's log could show. Knows no
run.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request, Response
from headrace_schema.resources.views import LinkView
from starlette.exceptions import HTTPException

from headrace_coordinator.api.http.errors import error_response
from headrace_coordinator.api.http.requests import known_parameters, view_response

FOLDER = "/dashboard/"
OPEN = "/open"
DOWNLOAD = re.compile(r"/v1/runs/[^/?#]+/(?:export|checkpoints/[^?#]+)")
DOCS = "/docs"
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
POLICY = "; ".join(
    [
        *("default-src 'self'", "object-src 'none'", "base-uri 'none'"),
        *("form-action 'none'", "frame-ancestors 'none'"),
        "media-src blob:",  # videos, which are fetched with the token
        "img-src 'self' data:",  # images of prompts, and icons in Swagger UI's stylesheet
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
LIFE_S = 60.0
MAX_LINKS = 32  # a newer link replaces the oldest


def is_page(path: str) -> bool:
    """Whether a path is of the pages' files, there or not."""
    return path in ("/", DOCS) or path.startswith((FOLDER, DOCS + "/"))


@cache
def page_files(folder: str = "dashboard") -> dict[str, tuple[bytes, str, str]]:
    """Name below a folder of the package to (content, media type, entity tag)."""
    return dict(_found(files("headrace_coordinator").joinpath(folder), ""))


def _found(folder: Traversable, prefix: str) -> list[tuple[str, tuple[bytes, str, str]]]:
    found = []
    for entry in folder.iterdir():
        ending = entry.name.rpartition(".")[2]
        if entry.is_dir():
            found += _found(entry, f"{prefix}{entry.name}/")
        elif ending in TYPES:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found.append((prefix + entry.name, (content, TYPES[ending], tag)))
    return found


def page_routes() -> APIRouter:
    """`/` and what lies below `/dashboard/`; `/docs`, Swagger UI on the API's description, and what lies below it."""
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def get_dashboard(request: Request) -> Response:
        return _answer(request, "index.html")

    @routes.api_route(FOLDER + "{name:path}", methods=["GET", "HEAD"])
    async def get_dashboard_file(request: Request, name: str) -> Response:
        return _answer(request, name)

    @routes.api_route(DOCS, methods=["GET", "HEAD"])
    async def get_docs(request: Request) -> Response:
        return _answer(request, "index.html", "api_reference")

    @routes.api_route(DOCS + "/{name:path}", methods=["GET", "HEAD"])
    async def get_docs_file(request: Request, name: str) -> Response:
        return _answer(request, name, "api_reference")

    return routes


def _answer(request: Request, name: str, folder: str = "dashboard") -> Response:
    found = page_files(folder)
    if name not in found:
        raise HTTPException(404)
    content, media_type, tag = found[name]
    headers = HEADERS | {"ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)


class Links:
    """Codes that are good once, for one path and for `LIFE_S` seconds."""

    def __init__(self) -> None:
        self._links: dict[str, tuple[str, float]] = {}

    def make(self, path: str) -> str:
        """A new code for a path."""
        if len(self._links) >= MAX_LINKS:
            self._links.pop(next(iter(self._links)))
        code = secrets.token_urlsafe(24)
        self._links[code] = (path, time.monotonic() + LIFE_S)
        return code

    def redeem(self, code: str, path: str) -> bool:
        """Whether the code is good for a path; it is used up."""
        found = [known for known in self._links if hmac.compare_digest(known.encode(), code.encode())]
        target, expiry = self._links.pop(found[0]) if found else ("", 0.0)
        return target == path and expiry > time.monotonic()


def link_routes(token: str | None, links: Links) -> APIRouter:
    """Makes and follows links; without a token a link is the plain address."""
    routes = APIRouter(tags=["service"], dependencies=[Depends(known_parameters)])

    @routes.post("/v1/links", response_model=LinkView, status_code=201)
    async def create_link(
        download: Annotated[str, Query(pattern=f"^({DOWNLOAD.pattern})?$")] = "",
    ) -> Response:
        """A path that opens the dashboard, or a download, once, in a browser that does not show the token."""
        path = f"{download or OPEN}?code={links.make(download or OPEN)}" if token else download or "/"
        response = view_response(LinkView(path=path, expires_in_s=LIFE_S))
        response.status_code = 201
        return response

    @routes.get(OPEN, response_class=Response, status_code=303)
    async def open_link(code: str = "", run: str = "") -> Response:
        """Leads to `/#token=…`, or to the page of a run. A fragment is sent to no server. Needs no token."""
        if token and not links.redeem(code, OPEN):
            return error_response(
                "UNAUTHENTICATED", "this link was used or has expired; `headrace open` makes a new one"
            )
        parts = [f"token={quote(token, safe='')}"] if token else []
        parts += [f"/runs/{quote(run, safe='')}"] if run else []
        where = "/#" + "&".join(parts) if parts else "/"
        headers = {"Location": where, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        return Response(status_code=303, headers=headers)

    return routes
