"""Routes of the coordinator itself: health, metrics of the fleet and the newest runs, dry runs of plans."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request, Response
from headrace_planner import PlanError
from headrace_planner.documents import PlanRequest
from headrace_planner.explaining import explain
from headrace_schema.problems import as_views
from headrace_schema.resources.fleet import HealthView
from headrace_schema.resources.views import RunView
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.http.requests import JSON, body_of, known_parameters, read_model, view_response
from headrace_coordinator.api.refusal import Refused

if TYPE_CHECKING:
    from headrace_coordinator.api.reading.reads import Reads
    from headrace_coordinator.app import Coordinator

PEM = "application/x-pem-file"
RUNS_SHOWN = 20  # Each run is a label value; a long life must not make the page grow without end.


def service_routes(coordinator: Coordinator) -> APIRouter:
    """The routes of the coordinator as a service; unversioned."""
    routes = APIRouter(tags=["service"], dependencies=[Depends(known_parameters)])

    @routes.get("/healthz", response_model=HealthView, responses={503: {"model": HealthView}})
    async def get_health() -> Response:
        """Store, event loop and tasks of the coordinator; 503 with the reason when unhealthy. Needs no token."""
        health = coordinator.vitals.view()
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
        (runs, _), instances = self._reads.runs(RUNS_SHOWN), self._reads.instances()
        states = GaugeMetricFamily("headrace_runs", "Runs by state", labels=["state"])
        for state, count in sorted(self._reads.run_states().items()):
            states.add_metric([state], count)
        yield states
        yield _counted(
            "headrace_instances",
            "Processes by kind and state",
            ["kind", "state"],
            ((item.kind, item.state) for item in instances),
        )
        leases, devices = self._reads.leases(), self._reads.devices()
        yield _counted("headrace_leases", "Leases by state", ["state"], ((item.state,) for item in leases))
        yield _counted("headrace_devices", "Devices by state", ["state"], ((item.state,) for item in devices))
        memory = GaugeMetricFamily(
            "headrace_instance_resident_memory_bytes", "Resident memory", labels=["instance", "kind"]
        )
        cores = GaugeMetricFamily(
            "headrace_instance_busy_cores", "Cores kept busy", labels=["instance", "kind"]
        )
        busy = GaugeMetricFamily(
            "headrace_gpu_busy_ratio", "Share of time in which it computed", labels=["device"]
        )
        used = GaugeMetricFamily("headrace_gpu_used_memory_bytes", "Memory in use", labels=["device"])
        for item in instances:
            memory.add_metric([item.name, item.kind], item.resident_memory_bytes)
            cores.add_metric([item.name, item.kind], item.busy_cores)
        # Instances that take turns on a GPU both tell of it.
        for gpu in {gpu.device: gpu for item in instances for gpu in item.gpus}.values():
            busy.add_metric([gpu.device], gpu.busy)
            used.add_metric([gpu.device], gpu.used_memory_bytes)
        yield from (memory, cores, busy, used)
        wanted = GaugeMetricFamily(
            "headrace_instances_wanted", "Instances that the runs of now could use", labels=["kind"]
        )
        for kind, count in self._reads.instances_wanted().items():
            wanted.add_metric([kind], count)
        yield wanted
        sessions = CounterMetricFamily(
            "headrace_run_sessions",
            "Sessions that ended, by what became of them",
            labels=["run", "outcome"],
        )
        for run in runs:
            for outcome, count in sorted(self._reads.sessions_ended(run.id).items()):
                sessions.add_metric([run.id, outcome], count)
        yield sessions
        yield from _run_families(runs)


def _counted(name: str, text: str, labels: list[str], values: Iterable[tuple[str, ...]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for value, count in sorted(Counter(values).items()):
        family.add_metric(list(value), count)
    return family


def _run_families(runs: list[RunView]) -> Iterator[GaugeMetricFamily]:
    figures = {
        "headrace_run_running": "1 while the run trains, else 0",
        "headrace_run_stalled": "1 while the step in hand stands still, else 0",
        "headrace_run_step": "Committed steps",
        "headrace_run_recoveries": "Recoveries",
        "headrace_run_reward_mean": "Mean reward of the last step",
        "headrace_run_tokens_per_second": "Tokens per second of the last step",
        "headrace_run_step_seconds": "Seconds of the last step",
        "headrace_run_max_staleness": "Worst staleness of any trained token",
    }
    families = {name: GaugeMetricFamily(name, text, labels=["run"]) for name, text in figures.items()}
    slots = GaugeMetricFamily("headrace_run_slots", "Slots by outcome", labels=["run", "outcome"])
    stages = GaugeMetricFamily(
        "headrace_run_stage_seconds", "Seconds of the last step", labels=["run", "stage"]
    )
    for run in runs:
        for name, value in _figures(run).items():
            families[name].add_metric([run.id], value)
        slots.add_metric([run.id, "trained"], run.counts.trained)
        slots.add_metric([run.id, "dropped"], run.counts.dropped)
        for stage, seconds in (run.last_step.stage_s if run.last_step else {}).items():
            stages.add_metric([run.id, stage], seconds)
    yield from (*families.values(), slots, stages)


def _figures(run: RunView) -> dict[str, float]:
    """What was measured."""
    found: dict[str, float | None] = {
        "headrace_run_running": float(run.state == "RUNNING"),
        "headrace_run_stalled": float(run.stalled),
        "headrace_run_step": float(run.step),
        "headrace_run_recoveries": float(run.recoveries),
        "headrace_run_max_staleness": run.counts.max_staleness,
    }
    if run.last_step:
        found["headrace_run_reward_mean"] = run.last_step.reward_mean
        found["headrace_run_tokens_per_second"] = run.last_step.tokens_per_s
        found["headrace_run_step_seconds"] = run.last_step.wall_s
    return {name: float(value) for name, value in found.items() if value is not None}
