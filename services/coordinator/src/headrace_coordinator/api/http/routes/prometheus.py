"""The fleet and the newest runs as Prometheus gauges, made from views when they are asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from headrace_schema.resources.views import RunView
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace_coordinator.api.control import Control

CONTENT_TYPE = CONTENT_TYPE_LATEST
RUNS_SHOWN = 20  # Each run is a label value; a long life must not make the page grow without end.


def exposition(control: Control) -> bytes:
    """The process's own metrics, then those of the fleet and of runs."""
    registry = CollectorRegistry()
    registry.register(FleetCollector(control))
    return generate_latest(REGISTRY) + generate_latest(registry)


class FleetCollector(Collector):
    """Gauges over what `Control` shows."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All families."""
        (runs, _), instances = self._control.runs(RUNS_SHOWN), self._control.instances()
        states = GaugeMetricFamily("headrace_runs", "Runs by state", labels=["state"])
        for state, count in sorted(self._control.run_states().items()):
            states.add_metric([state], count)
        yield states
        yield _counted(
            "headrace_instances",
            "Processes by kind and state",
            ["kind", "state"],
            ((item.kind, item.state) for item in instances),
        )
        leases, devices = self._control.leases(), self._control.devices()
        yield _counted("headrace_leases", "Leases by state", ["state"], ((item.state,) for item in leases))
        yield _counted("headrace_devices", "Devices by state", ["state"], ((item.state,) for item in devices))
        memory = GaugeMetricFamily(
            "headrace_instance_resident_memory_bytes", "Resident memory", labels=["instance", "kind"]
        )
        for item in instances:
            memory.add_metric([item.name, item.kind], item.resident_memory_bytes)
        yield memory
        yield from _run_families(runs)


def _counted(name: str, text: str, labels: list[str], values: Iterable[tuple[str, ...]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for value, count in sorted(Counter(values).items()):
        family.add_metric(list(value), count)
    return family


def _run_families(runs: list[RunView]) -> Iterator[GaugeMetricFamily]:
    figures = {
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
    found = {
        "headrace_run_step": float(run.step),
        "headrace_run_recoveries": float(run.recoveries),
        "headrace_run_max_staleness": float(run.counts.max_staleness),
    }
    if run.last_step:
        found["headrace_run_reward_mean"] = run.last_step.reward_mean
        found["headrace_run_tokens_per_second"] = run.last_step.tokens_per_s
        found["headrace_run_step_seconds"] = run.last_step.wall_s
    return found
