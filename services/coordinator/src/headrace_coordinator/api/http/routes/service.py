"""Routes of the coordinator itself: health, metrics of the fleet and the newest runs, dry runs of plans."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from headrace_planner import PlanError
from headrace_planner.documents import PlanRequest
from headrace_planner.explaining import explain
from headrace_schema.problems import as_views
from headrace_schema.resources.fleet import HealthView
from headrace_schema.resources.views import RunView
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field

from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.http.requests import JSON, body_of, known_parameters, read_model, view_response
from headrace_coordinator.api.http.routes.fleet import INSTANCE_STATES, KINDS, LEASE_STATES
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain import run_states

if TYPE_CHECKING:
    from headrace_coordinator.api.reading.reads import Reads
    from headrace_coordinator.app import Coordinator

PEM = "application/x-pem-file"
DEVICE_STATES = ("FREE", "LEASED", "QUARANTINED")
RUNS_SHOWN = 20  # Each run is a label value; a long life must not make the page grow without end.


def service_routes(coordinator: Coordinator, *, login: bool) -> APIRouter:
    """The routes of the coordinator as a service; unversioned. `login`: browsers may log in."""
    routes = APIRouter(tags=["service"], dependencies=[Depends(known_parameters)])

    @routes.get("/healthz", response_model=HealthView, responses={503: {"model": HealthView}})
    async def get_health() -> Response:
        """Store, event loop and tasks of the coordinator; 503 with the reason when unhealthy. Needs no token."""
        health = coordinator.vitals.view().model_copy(update={"login": login})
        response = view_response(health)
        response.status_code = 200 if health.status == "ok" else 503
        return response

    @routes.get("/ca.pem", include_in_schema=False)
    async def get_authority() -> Response:
        """What this fleet's certificates come from; who has its fingerprint can trust it. Needs no token."""
        from headrace_servicekit.rpc.tls import AUTHORITY, tls_dir  # gRPC comes with it

        folder = tls_dir()
        if folder is None:
            return Response(status_code=404)
        return Response(await asyncio.to_thread((folder / AUTHORITY).read_bytes), media_type=PEM)

    @routes.get("/metrics", response_class=Response)
    async def get_metrics() -> Response:
        """Metrics of the coordinator, the fleet and the newest runs, in Prometheus' text format."""
        return Response(_exposition(coordinator.reads), media_type=CONTENT_TYPE_LATEST)

    return routes


class JoinRequest(BaseModel):
    """What a host asks that joins: certificates (PKCS #10, PEM) by role, with the proof of the secret."""

    model_config = ConfigDict(extra="forbid")

    nonce: str = Field(max_length=64)
    host: str = Field(max_length=256)
    requests: dict[str, str]
    proof: str = Field(max_length=64)


def joining_routes(authority: Path, own: Path, secret: str) -> APIRouter:
    """The route by which hosts that prove the secret get certificates; no part of the API."""
    routes = APIRouter(include_in_schema=False)

    @routes.post("/join")
    async def join_host(request: Request) -> Response:
        """Certificates of a host's processes; the proof in the body stands for a token."""
        from headrace_servicekit.rpc.errors import ServiceError  # gRPC comes with it
        from headrace_servicekit.rpc.joining import admit

        asked = await read_model(request, JoinRequest, "the request of a host that joins")
        peer = request.client.host if request.client is not None else ""
        try:
            return JSONResponse(
                await asyncio.to_thread(admit, authority, own, secret, asked.model_dump(), peer)
            )
        except ServiceError as error:
            raise Refused(error.reason, error.message) from error

    return routes


def plan_routes() -> APIRouter:
    """The route of plans. One search runs at a time; it takes a core for seconds."""
    routes = APIRouter(prefix="/v1", tags=["plans"], dependencies=[Depends(known_parameters)])
    searching = asyncio.Lock()

    @routes.post("/plans", response_model=dict[str, Any], openapi_extra=body_of("PlanRequest", JSON))
    async def predict_plan(request: Request) -> dict[str, Any]:
        """Predicts the fastest use of devices for a workflow and its profiles, and explains it. Starts nothing."""
        wanted = await read_model(request, PlanRequest, "the request for a plan")
        if searching.locked():
            raise Refused("UNAVAILABLE", "another plan is being searched for; try again")
        async with searching:
            try:
                return await asyncio.to_thread(explain, wanted)
            except PlanError as error:
                raise invalid(as_views(error.problems), "the request for a plan") from error

    return routes


def _exposition(reads: Reads) -> bytes:
    """The process's own metrics, then those of the fleet and of runs."""
    registry = CollectorRegistry()
    registry.register(_FleetCollector(reads))
    return generate_latest(REGISTRY) + generate_latest(registry)


class _FleetCollector(Collector):
    """Figures made from views when they are asked for."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    def collect(self) -> Iterator[Metric]:
        """All families."""
        reads = self._reads
        (runs, _), instances = reads.runs(RUNS_SHOWN), reads.instances()
        leases, devices = reads.leases(), reads.devices()
        own = [(item.name, item.kind, item.resident_memory_bytes, item.busy_cores) for item in instances]
        # Instances that take turns on a GPU both tell of it.
        gpus = {gpu.device: gpu for item in instances for gpu in item.gpus}.values()
        yield _family(
            "headrace_runs", "Runs by state", "state", _by_state(reads.run_states(), run_states.STATES)
        )
        there = product(KINDS, (state for state in INSTANCE_STATES if state != "LOST"))
        kinds = _counted(((item.kind, item.state) for item in instances), there)
        yield _family("headrace_instances", "Processes by kind and state", "kind state", kinds)
        held = _by_state(Counter(one.state for one in leases), LEASE_STATES)
        yield _family("headrace_leases", "Leases by state", "state", held)
        states = _by_state(Counter(one.state for one in devices), DEVICE_STATES)
        yield _family("headrace_devices", "Devices by state", "state", states)
        memory = [(name, kind, used) for name, kind, used, _ in own]
        name = "headrace_instance_resident_memory_bytes"
        yield _family(name, "Resident memory", "instance kind", memory)
        cores = [(name, kind, busy) for name, kind, _, busy in own]
        yield _family("headrace_instance_busy_cores", "Cores kept busy", "instance kind", cores)
        busy = [(gpu.device, gpu.busy) for gpu in gpus]
        yield _family("headrace_gpu_busy_ratio", "Share of time in which it computed", "device", busy)
        used = [(gpu.device, gpu.used_memory_bytes) for gpu in gpus]
        yield _family("headrace_gpu_used_memory_bytes", "Memory in use", "device", used)
        wanted = (dict.fromkeys(KINDS, 0) | reads.instances_wanted()).items()
        yield _family("headrace_instances_wanted", "Instances that the runs of now could use", "kind", wanted)
        waited = [(reads.queue_wait(),)]
        yield _family("headrace_queue_wait_seconds", "Longest wait of a run that is QUEUED", "", waited)
        name = "headrace_run_checkpoint_age_seconds"
        yield _family(name, "Since the newest checkpoint", "run", reads.checkpoint_ages().items())
        sessions = CounterMetricFamily(
            "headrace_run_sessions", "Sessions that ended, by what became of them", labels=["run", "outcome"]
        )
        for run in runs:
            for outcome, count in sorted(reads.sessions_ended(run.id).items()):
                sessions.add_metric([run.id, outcome], count)
        yield sessions
        yield from run_families(runs)


def _family(name: str, text: str, labels: str, rows: Iterable[tuple[Any, ...]]) -> GaugeMetricFamily:
    """A gauge of rows (value of each label, figure); without those whose figure was not measured."""
    family = GaugeMetricFamily(name, text, labels=labels.split())
    for *values, figure in rows:
        if figure is not None:
            family.add_metric(values, figure)
    return family


def _by_state(counts: Mapping[str, int], states: Iterable[str]) -> list[tuple[Any, ...]]:
    """Each state with its count: one that nothing is in has 0, for a series that is absent is no figure."""
    return [(state, counts.get(state, 0)) for state in sorted({*states, *counts})]


def _counted(values: Iterable[tuple[str, ...]], there: Iterable[tuple[str, ...]]) -> list[tuple[Any, ...]]:
    counts = Counter(values)
    return [(*value, counts[value]) for value in sorted({*there, *counts})]


FIGURES: dict[str, tuple[str, Callable[[RunView], float | None]]] = {
    "headrace_run_running": ("1 while the run trains, else 0", lambda run: run.state == "RUNNING"),
    "headrace_run_stalled": ("1 while the step in hand stands still, else 0", lambda run: run.stalled),
    "headrace_run_step": ("Committed steps", lambda run: run.step),
    "headrace_run_recoveries": ("Recoveries", lambda run: run.recoveries),
    "headrace_run_engine_restarts": (
        "Processes of engines that were started again",
        lambda run: run.engine_restarts,
    ),
    "headrace_run_reward_mean": (
        "Mean reward of the last step",
        lambda run: getattr(run.last_step, "reward_mean", None),
    ),
    "headrace_run_tokens_per_second": (
        "Tokens per second of the last step",
        lambda run: getattr(run.last_step, "tokens_per_s", None),
    ),
    "headrace_run_draft_acceptance": (
        "Share of the last step's drafted tokens that were accepted",
        lambda run: getattr(run.last_step, "figures", {}).get("draft_acceptance"),
    ),
    "headrace_run_step_seconds": (
        "Seconds of the last step",
        lambda run: getattr(run.last_step, "wall_s", None),
    ),
    "headrace_run_upload_behind_steps": (
        "Steps between the newest checkpoint on disk and the newest that is whole in the run's store",
        lambda run: run.uploads.behind_steps if run.uploads else None,
    ),
    "headrace_run_upload_seconds": (
        "Seconds of the last upload of a checkpoint",
        lambda run: run.uploads.seconds if run.uploads else None,
    ),
    "headrace_run_uploads_skipped": (
        "Checkpoints not uploaded, as uploads are slower than checkpoints",
        lambda run: run.uploads.skipped if run.uploads else None,
    ),
    "headrace_run_upload_failing": (
        "1 while the run's store refuses uploads, else 0",
        lambda run: bool(run.uploads.problem) if run.uploads else None,
    ),
    "headrace_run_max_staleness": (
        "Worst staleness of any trained token",
        lambda run: run.counts.max_staleness,
    ),
}


def run_families(runs: list[RunView]) -> Iterator[GaugeMetricFamily]:
    """Gauges of each run."""
    for name, (text, figure) in FIGURES.items():
        yield _family(name, text, "run", ((run.id, figure(run)) for run in runs))
    ends = [(run.id, end, getattr(run.counts, end)) for run in runs for end in ("trained", "dropped")]
    yield _family("headrace_run_slots", "Slots by outcome", "run outcome", ends)
    stages = [
        (run.id, stage, seconds)
        for run in runs
        if run.last_step
        for stage, seconds in run.last_step.stage_s.items()
    ]
    yield _family("headrace_run_stage_seconds", "Seconds of the last step", "run stage", stages)
