"""Trackio, Hugging Face's local-first tracker. Does not know how a run's metrics reach it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_servicekit.registry import Options
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.trackers.tracker import TrackedRun, Tracker


class TrackioOptions(Options):
    """Where the run appears: in TRACKIO_DIR of the coordinator's environment (`trackio show`), or in a Space."""

    project: str = Field(default="headrace", min_length=1, description="project")
    space_id: str = Field(default="", description="Hugging Face Space, such as owner/name; default: local")


class TrackioTracker(Tracker):
    """Trackio: one run under the run's id, on this machine or in a Space."""

    options = TrackioOptions
    modules = ("trackio",)
    install = "headrace-coordinator[trackio]"

    def __init__(self, options: TrackioOptions, run: TrackedRun) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=options.project,
            name=run.id,
            space_id=options.space_id or None,
            config=dict(run.spec),
            resume="allow",
            embed=False,
        )

    @override
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    @override
    def finish(self, state: str) -> None:
        self._run.finish()
