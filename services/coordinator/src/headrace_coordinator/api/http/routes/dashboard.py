"""The files of the dashboard and of /docs.

Files are read once and served with a policy under which nothing else runs. They hold no data, so they need no token;
what they show they ask of the API, with the user's token. Knows no run.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

FOLDER = "/dashboard/"
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
        "img-src 'self' data: blob:",  # images of prompts and demonstrations, icons of Swagger UI
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


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
