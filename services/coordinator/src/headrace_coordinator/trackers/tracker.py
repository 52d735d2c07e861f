"""What an experiment tracker is, and the registry that picks one by name.

To add one, add a file here and name it below, or publish a subclass in the entry point group `headrace.trackers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.tracking import TrackerSection, TrackingSection
from headrace_servicekit.registry import Options, Plugin, PluginError, Registry


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker records: its id, its spec as JSON, and its directory."""

    id: str
    spec: Mapping[str, Any]
    directory: Path


class Tracker(ABC):
    """Sends metrics of one run. It runs in a process of its own: it may block, and may raise anything.

    The constructor takes the options and the TrackedRun. It is called again with the same run after a pause, a
    yield or a restart of the coordinator, and should then continue the same entry.
    """

    options: ClassVar[type[Options]] = Options
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules that the constructor imports; a spec that names the tracker is refused where they are missing."""
    install: ClassVar[str] = ""
    """What to install to have these modules, as `pip install` takes it."""

    @abstractmethod
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Records metrics of a step, from 1 (an evaluation's may be 0). After a rewind a step comes again."""

    @abstractmethod
    def finish(self, state: str) -> None:
        """Sends what is left. `state` is the run's: SUCCEEDED, FAILED or CANCELLED, or "" when it will go on."""


def _as_plugin(found: Any) -> Plugin:
    if isinstance(found, type) and issubclass(found, Tracker):
        return Plugin(found, found.options, (found.__doc__ or "").partition("\n")[0])
    raise TypeError("is no subclass of headrace_coordinator.trackers.Tracker")


TRACKERS: Registry[Tracker] = Registry(
    "headrace.trackers",
    "tracker",
    "name",
    "options",
    {
        "mlflow": "headrace_coordinator.trackers.mlflow:MlflowTracker",
        "notify": "headrace_coordinator.trackers.notify:NotifyTracker",
        "trackio": "headrace_coordinator.trackers.trackio:TrackioTracker",
        "wandb": "headrace_coordinator.trackers.wandb:WandbTracker",
    },
    _as_plugin,
)


def tracker_problems(tracking: TrackingSection) -> Iterator[KeyProblemView]:
    """Trackers that do not exist or are not installed here, options and secrets that are wrong."""
    seen: set[str] = set()
    for index, section in enumerate(tracking.trackers):
        key = f"tracking.trackers[{index}]"
        if section.name in seen:
            yield problem(f"{key}.name", f"{section.name} is named twice", "name each tracker once")
            continue
        seen.add(section.name)
        yield from _problems(section, key)


def _problems(section: TrackerSection, key: str) -> Iterator[KeyProblemView]:
    factory = None
    try:
        chosen = TRACKERS.choose(section.name, section.options)
        factory = chosen.plugin.factory()
        chosen.read_options()
    except PluginError as error:
        for each in error.problems:
            yield problem(f"{key}.{each.key}", each.problem, each.fix)
    if isinstance(factory, type) and issubclass(factory, Tracker):
        missing = [name for name in factory.modules if find_spec(name) is None]
        if missing:
            reason = f"the coordinator's Python has no module {', '.join(missing)}"
            yield problem(
                f"{key}.name", reason, f"run pip install '{factory.install}' there, or remove the tracker"
            )
