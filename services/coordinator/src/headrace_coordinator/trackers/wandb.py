"""Weights & Biases. Does not know how a run's metrics reach it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from headrace_servicekit.registry import Options
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.trackers.tracker import TrackedRun, Tracker

STEP = "step"


class WandbOptions(Options):
    """Where the run appears. The API key is WANDB_API_KEY of the coordinator's environment, or wandb's own login."""

    project: str = Field(default="headrace", min_length=1, description="project")
    entity: str = Field(default="", description="user or team; default: that of the API key")
    mode: Literal["online", "offline"] = Field(
        default="online", description="offline: files in RUN/wandb, which `wandb sync` uploads"
    )
    tags: list[str] = Field(default_factory=list, description="tags of the run")


class WandbTracker(Tracker):
    """Weights & Biases: one run under the run's id."""

    options = WandbOptions
    modules = ("wandb",)
    install = "headrace-coordinator[wandb]"

    def __init__(self, options: WandbOptions, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=options.project,
            entity=options.entity or None,
            id=run.id,
            name=run.id,
            tags=options.tags,
            dir=str(run.directory),
            config=dict(run.spec),
            mode=options.mode,
            resume="allow",
        )
        # wandb drops figures of a step below its newest one: a rewound run needs a step of its own as the axis.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    @override
    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, STEP: step})

    @override
    def finish(self, state: str) -> None:
        self._run.finish(exit_code=int(state in ("FAILED", "CANCELLED")))
