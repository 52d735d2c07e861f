"""Routes of who may call: who I am, what is used, and an admin's tokens and quotas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response
from headrace_schema.access import QuotaRequest, TokenRequest
from headrace_schema.resources.access import (
    MeView,
    NewTokenView,
    QuotaListView,
    QuotaView,
    RevokedView,
    TokenListView,
    UsageListView,
)

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.api.http.requests import body_of, known_parameters, read_model, view_response

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator


def access_routes(coordinator: Coordinator) -> APIRouter:
    """The routes of callers and tokens."""
    routes = APIRouter(prefix="/v1", tags=["access"], dependencies=[Depends(known_parameters)])

    @routes.get("/me", response_model=MeView)
    async def get_me() -> Response:
        """Who makes this request, and what it may do."""
        caller = CALLER.get()
        view = MeView(
            name=caller.name,
            teams=list(caller.teams),
            scopes=sorted(caller.scopes),
            token=caller.token,
            expires_at=caller.expires_at or None,
        )
        return view_response(view)

    @routes.get("/tokens", response_model=TokenListView)
    async def list_tokens() -> Response:
        """Tokens that are not revoked, without their secrets."""
        return view_response(TokenListView(tokens=coordinator.tokens.all()))

    @routes.post(
        "/tokens", status_code=201, response_model=NewTokenView, openapi_extra=body_of("TokenRequest")
    )
    async def create_token(request: Request) -> Response:
        """Makes a token. Its secret is in this answer and nowhere else: the store has its SHA-256."""
        asked = await read_model(request, TokenRequest, "the request for a token")
        return view_response(await coordinator.tokens.create(asked), 201)

    @routes.post("/tokens/{name}:revoke", response_model=RevokedView)
    async def revoke_token(name: str) -> Response:
        """Ends a token at once: no request with it is answered any more, and its open streams end."""
        await coordinator.tokens.revoke(name)
        return view_response(RevokedView(name=name))

    @routes.get("/usage", response_model=UsageListView)
    async def list_usage() -> Response:
        """What you and your team use and may use; of everybody for those who operate the fleet."""
        return view_response(UsageListView(usage=await coordinator.quotas.usage(CALLER.get())))

    @routes.get("/quotas", response_model=QuotaListView)
    async def list_quotas() -> Response:
        """All quotas that are set."""
        return view_response(QuotaListView(quotas=coordinator.quotas.all()))

    @routes.post("/quotas", response_model=QuotaView, openapi_extra=body_of("QuotaRequest"))
    async def set_quota(request: Request) -> Response:
        """Sets what a user or team may use, in place of what was set before. Runs that have begun are not ended."""
        asked = await read_model(request, QuotaRequest, "the quota")
        return view_response(await coordinator.quotas.set(asked))

    return routes
