"""Routes of the fleet: instances, leases, scaling; and of the service itself: schema, health, metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from headrace_schema.problems import choose, problem
from headrace_schema.resources.overviews import LogView
from headrace_schema.resources.views import DrainView, HealthView, InstanceListView, LeaseListView, ScaleView
from headrace_schema.spec import RunSpec
from pydantic import BaseModel, ConfigDict, Field

from headrace_coordinator.api.control import Control, Refused
from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.http.pagination import page
from headrace_coordinator.api.http.requests import (
    STATE_FILTER,
    GivenKey,
    PageSize,
    PageToken,
    key_or_new,
    keyed_response,
    known_parameters,
    known_states,
    read_model,
    view_response,
)
from headrace_coordinator.api.http.routes.prometheus import CONTENT_TYPE, exposition
from headrace_coordinator.api.reading.instance_logs import read_log

Level = Literal["debug", "info", "warning", "error", "critical"]
ELSEWHERE = (
    "the launcher of `headrace up` writes it there; in containers see `docker compose logs NAME`, "
    "on another host its own log"
)
KINDS = ("rollout", "trainer", "simulator", "reward")
INSTANCE_STATES = ("READY", "SILENT", "DRAINING", "LOST")
LEASE_STATES = ("GRANTED", "HELD", "REVOKING")
InstanceStateName = Annotated[str, Field(json_schema_extra={"enum": [*INSTANCE_STATES]})]
LeaseStateName = Annotated[str, Field(json_schema_extra={"enum": [*LEASE_STATES]})]
Kind = Annotated[str, PathParameter(json_schema_extra={"enum": [*KINDS]})]
SCALE_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            media_type: {"schema": {"$ref": "#/components/schemas/ScaleRequest"}}
            for media_type in ("application/json", "application/yaml")
        },
    }
}


class ScaleRequest(BaseModel):
    """How many processes of a kind are wanted."""

    model_config = ConfigDict(extra="forbid")

    count: Annotated[int, Field(strict=True, ge=0, le=1024, description="wanted number of processes")]


def fleet_routes(control: Control, logs_directory: Path) -> APIRouter:
    """The routes of the fleet; logs of instances are read from `logs_directory`."""
    routes = APIRouter(prefix="/v1", tags=["fleet"], dependencies=[Depends(known_parameters)])

    @routes.get("/instances", response_model=InstanceListView)
    async def list_instances(
        page_size: PageSize = 500,
        page_token: PageToken = "",
        state: Annotated[list[InstanceStateName] | None, STATE_FILTER] = None,
        order: Annotated[Literal["name", "host"], Query(description="sorted by this, then by name")] = "name",
    ) -> Response:
        """Processes of the services."""
        states = known_states(state, INSTANCE_STATES)
        every = sorted(control.instances(), key=lambda item: (getattr(item, order), item.name))
        shown, token = page(
            every,
            lambda item: item.incarnation,
            page_size,
            page_token,
            lambda item: _among(states, item.state),
        )
        return view_response(InstanceListView(instances=shown, next_page_token=token))

    @routes.get("/instances/{name}/logs", response_model=LogView)
    async def get_instance_logs(
        name: str,
        level: Annotated[Level, Query(description="least level of a line")] = "info",
        lines: Annotated[int, Query(ge=1, le=1000, description="most lines, the newest ones")] = 200,
    ) -> Response:
        """The newest lines of an instance's log, where the launcher of this machine writes it."""
        found = await asyncio.to_thread(read_log, logs_directory, name, level, lines)
        if found is None:
            raise Refused("NOT_FOUND", f"there is no log of {name[:40]!r} in the data directory; {ELSEWHERE}")
        return view_response(LogView(instance=name, lines=found))

    @routes.post("/instances/{name}:drain", response_model=DrainView)
    async def drain_instance(name: str, idempotency_key: GivenKey = None) -> Response:
        """Takes an instance out of use: no new work, what it holds is handed over or saved, then its process ends.

        Its supervisor starts a new process in its place; to have fewer, scale the service.
        """
        key = key_or_new(idempotency_key)
        return keyed_response(DrainView(instance=name, incarnation=await control.drain(name, key)), key)

    @routes.get("/leases", response_model=LeaseListView)
    async def list_leases(
        page_size: PageSize = 500,
        page_token: PageToken = "",
        state: Annotated[list[LeaseStateName] | None, STATE_FILTER] = None,
        order: Annotated[
            Literal["oldest", "newest"], Query(description="which lease comes first")
        ] = "oldest",
    ) -> Response:
        """Leases, and on every page all devices, whatever leases are asked for."""
        states = known_states(state, LEASE_STATES)
        every = sorted(control.leases(), key=lambda lease: lease.epoch, reverse=order == "newest")
        shown, token = page(
            every,
            lambda lease: str(lease.epoch),
            page_size,
            page_token,
            lambda item: _among(states, item.state),
        )
        view = LeaseListView(leases=shown, devices=control.devices(), next_page_token=token)
        return view_response(view)

    @routes.post("/services/{kind}:scale", response_model=ScaleView, openapi_extra=SCALE_BODY)
    async def scale_service(request: Request, kind: Kind, idempotency_key: GivenKey = None) -> Response:
        """Sets the number of processes of a kind, where a supervisor can."""
        wanted = await read_model(request, ScaleRequest, "the request to scale")
        if kind not in KINDS:
            raise invalid([problem("kind", f"there is no service {kind[:40]!r}", choose(kind, KINDS))])
        key = key_or_new(idempotency_key)
        return keyed_response(ScaleView(kind=kind, count=await control.scale(kind, wanted.count, key)), key)

    @routes.get("/spec-schema", response_model=dict[str, Any])
    async def get_spec_schema() -> dict[str, Any]:
        """JSON Schema of run specs."""
        return RunSpec.model_json_schema()

    return routes


def _among(states: frozenset[str], state: str) -> bool:
    return not states or state in states


def service_routes(control: Control) -> APIRouter:
    """The routes of the coordinator as a service; unversioned."""
    routes = APIRouter(tags=["service"], dependencies=[Depends(known_parameters)])

    @routes.get("/healthz", response_model=HealthView, responses={503: {"model": HealthView}})
    async def get_health() -> Response:
        """Store, event loop and tasks of the coordinator; 503 with the reason when unhealthy. Needs no token."""
        health = control.health()
        response = view_response(health)
        response.status_code = 200 if health.status == "ok" else 503
        return response

    @routes.get("/metrics", response_class=Response)
    async def get_metrics() -> Response:
        """Metrics of the coordinator, the fleet and the newest runs, in Prometheus' text format."""
        return Response(exposition(control), media_type=CONTENT_TYPE)

    return routes
