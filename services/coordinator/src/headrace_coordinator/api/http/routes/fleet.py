"""Routes of the fleet: instances and the newest lines of their logs, leases, scaling; and the schema of specs.

A launcher writes an instance's log beside the coordinator's data. Containers write to their own standard error: then
there is no file.
"""

from __future__ import annotations

import asyncio
import os
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParameter
from headrace_schema.problems import choose, problem
from headrace_schema.resources.fleet import (
    DeviceReleaseView,
    DrainView,
    InstanceListView,
    InstanceView,
    LeaseListView,
    LeaseView,
    ScaleView,
    ServiceListView,
    ServiceView,
)
from headrace_schema.resources.overviews import LogLineView, LogView
from headrace_schema.spec import RunSpec
from headrace_servicekit.folders import read_below
from pydantic import BaseModel, ConfigDict, Field

from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.http.requests import (
    STATE_FILTER,
    Key,
    PageSize,
    PageToken,
    body_of,
    keyed_response,
    known_parameters,
    known_states,
    page,
    read_model,
    view_response,
)
from headrace_coordinator.api.refusal import Refused

if TYPE_CHECKING:
    from headrace_coordinator.api.reading.reads import Reads
    from headrace_coordinator.app import Coordinator

Level = Literal["debug", "info", "warning", "error", "critical"]
ELSEWHERE = (
    "the launcher of `headrace up` writes it there; in containers see `docker compose logs NAME`, "
    "on another host its own log"
)
KINDS = ("rollout", "trainer", "simulator", "reward")
READ_BYTES = 1 << 20
SEARCH_BYTES = 16 * 1024 * 1024
MOST_CHARACTERS = 4000
Holder = TypeVar("Holder", InstanceView, LeaseView)
LEVELS = ("debug", "info", "warning", "error", "critical")
NAME = re.compile(r"[a-z]+(-[0-9]{1,6})?")
INSTANCE_STATES = ("READY", "SILENT", "DRAINING", "LOST")
LEASE_STATES = ("GRANTED", "HELD", "REVOKING")
InstanceStateName = Annotated[str, Field(json_schema_extra={"enum": [*INSTANCE_STATES]})]
LeaseStateName = Annotated[str, Field(json_schema_extra={"enum": [*LEASE_STATES]})]
Kind = Annotated[str, PathParameter(json_schema_extra={"enum": [*KINDS]})]


class ScaleRequest(BaseModel):
    """How many processes of a kind are wanted."""

    model_config = ConfigDict(extra="forbid")

    count: Annotated[int, Field(strict=True, ge=0, le=1024, description="wanted number of processes")]
    host: str = Field(
        "", max_length=253, description="on which host; may be left out where only one can change it"
    )


class DeviceRelease(BaseModel):
    """A device that a person knows to be free."""

    model_config = ConfigDict(extra="forbid")

    device: str = Field(
        max_length=256, description="full name of a device in quarantine, or the end of it, such as gpu:0"
    )
    reason: str = Field("", max_length=500, description="how that is known; kept in the event log")


def fleet_routes(coordinator: Coordinator, logs_directory: Path) -> APIRouter:
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
        found = _discreet(coordinator.reads, coordinator.reads.instances())
        every = sorted(found, key=lambda item: (getattr(item, order), item.name))
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
        search: Annotated[
            str, Query(max_length=200, description="only lines that contain this; case is ignored")
        ] = "",
    ) -> Response:
        """The newest lines of an instance's log, where the launcher of this machine writes it."""
        found = await asyncio.to_thread(read_log, logs_directory, name, level, lines, search)
        if found is None:
            raise Refused("NOT_FOUND", f"there is no log of {name[:40]!r} in the data directory; {ELSEWHERE}")
        return view_response(LogView(instance=name, lines=found))

    @routes.post("/instances/{name}:drain", response_model=DrainView)
    async def drain_instance(name: str, key: Key) -> Response:
        """Takes an instance out of use: no new work, what it holds is handed over or saved, then its process ends.

        Its supervisor starts a new process in its place; to have fewer, scale the service.
        """
        incarnation = await coordinator.instance_changes.drain(name, key)
        return keyed_response(DrainView(instance=name, incarnation=incarnation), key)

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
        found = _discreet(coordinator.reads, coordinator.reads.leases())
        every = sorted(found, key=lambda lease: lease.epoch, reverse=order == "newest")
        shown, token = page(
            every,
            lambda lease: str(lease.epoch),
            page_size,
            page_token,
            lambda item: _among(states, item.state),
        )
        devices = [
            device.model_copy(update={"reason": coordinator.reads.discreet(device.reason)})
            for device in coordinator.reads.devices()
        ]
        view = LeaseListView(leases=shown, devices=devices, next_page_token=token)
        return view_response(view)

    @routes.post("/devices:release", response_model=DeviceReleaseView, openapi_extra=body_of("DeviceRelease"))
    async def release_device(request: Request, key: Key) -> Response:
        """Ends a device's quarantine by a person's word that its last holder is gone.

        Refused (409) while that holder is connected or a connected supervisor runs it; nothing else checks the word:
        a holder that lives on elsewhere would share the device with the next one.
        """
        asked = await read_model(request, DeviceRelease, "the request to release a device")
        device = await coordinator.instance_changes.release_device(asked.device, key, asked.reason)
        return keyed_response(DeviceReleaseView(device=device), key)

    @routes.get("/services", response_model=ServiceListView)
    async def list_services() -> Response:
        """How many instances of each kind there are and could be used, and the autoscaling policy, which is off unless
        the coordinator was given bounds.
        """
        return view_response(ServiceListView(services=services_of(coordinator)))

    @routes.post("/services/{kind}:scale", response_model=ScaleView, openapi_extra=body_of("ScaleRequest"))
    async def scale_service(request: Request, kind: Kind, key: Key) -> Response:
        """Sets the number of processes of a kind, where a supervisor can."""
        wanted = await read_model(request, ScaleRequest, "the request to scale")
        if kind not in KINDS:
            raise invalid([problem("kind", f"there is no service {kind[:40]!r}", choose(kind, KINDS))])
        count = await coordinator.instance_changes.scale(kind, wanted.count, key, wanted.host)
        return keyed_response(ScaleView(kind=kind, count=count), key)

    @routes.get("/spec-schema", response_model=dict[str, Any])
    async def get_spec_schema() -> dict[str, Any]:
        """JSON Schema of run specs."""
        return RunSpec.model_json_schema()

    return routes


def services_of(coordinator: Coordinator) -> list[ServiceView]:
    """The services in the order of KINDS."""
    wanted, scaler = coordinator.reads.instances_wanted(), coordinator.autoscaler
    there = [item.kind for item in coordinator.reads.instances() if item.state != "DRAINING"]
    found = []
    for kind in KINDS:
        view = ServiceView(kind=kind, instances=there.count(kind), wanted=wanted.get(kind, 0))
        if kind in scaler.bounds:
            bounds, scaling = scaler.bounds[kind], scaler.scalings[kind]
            view.least, view.most = bounds.least, bounds.most
            view.asked, view.problem = scaling.asked, scaling.problem
        found.append(view)
    return found


def _discreet(reads: Reads, views: list[Holder]) -> list[Holder]:
    """The views, without the ids of runs that the caller may not know of."""
    return [view.model_copy(update={"run": reads.named(view.run)}) for view in views]


def _among(states: frozenset[str], state: str) -> bool:
    return not states or state in states


class _Record(msgspec.Struct):
    """What a line of `headrace_servicekit.logs` has; its other fields are not shown."""

    level: str
    message: str
    time: str = ""
    exception: str = ""


_decode = msgspec.json.Decoder(_Record).decode


def read_log(folder: Path, name: str, level: str, lines: int, search: str = "") -> list[LogLineView] | None:
    """At most `lines` records of at least a level in the file's last READ_BYTES, oldest first; None without a file.

    With `search` those of its last SEARCH_BYTES that contain it.
    A line that is no record (a traceback, a library's print) has the level of the record before it.
    """
    if not NAME.fullmatch(name):
        return None
    try:
        file = read_below(folder.parent, folder / f"{name}.log")
    except OSError:
        return None
    with file:
        most = SEARCH_BYTES if search else READ_BYTES
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        text = file.read(most).decode(errors="replace")
    whole = text.removesuffix("\n").split("\n")[1 if start else 0 :] if text else []
    found: list[LogLineView] = []
    for line in whole:
        found.append(_view(line, found[-1] if found else None))
    least = LEVELS.index(level)
    wanted = search.lower()
    return [each for each in found if LEVELS.index(each.level) >= least and (wanted in each.text.lower())][
        -lines:
    ]


def _view(line: str, before: LogLineView | None) -> LogLineView:
    try:
        record = _decode(line)
        time = datetime.fromisoformat(record.time).timestamp() if record.time else None
    except (msgspec.DecodeError, ValueError):
        level, time = (before.level, before.time) if before else ("info", None)
        return LogLineView(level=level, time=time, text=line[:MOST_CHARACTERS])
    text = f"{record.message}\n{record.exception}" if record.exception else record.message
    level = record.level if record.level in LEVELS else "info"
    return LogLineView(level=level, time=time, text=text[:MOST_CHARACTERS])
