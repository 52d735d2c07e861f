"""Figures of a run's steps from its history files, thinned out evenly: curves, and sparklines of rewards."""

from __future__ import annotations

from headrace_schema.resources.overviews import CurvesView, RewindView, ScorePointView
from headrace_schema.resources.views import StepView

from headrace_coordinator.api.reading.presenters import finite
from headrace_coordinator.domain import events as ev
from headrace_coordinator.projections.tensorboard import step_scalars
from headrace_coordinator.store.run_files import EVALUATION, RESTORE, STEP, RunFiles

SPARK_POINTS = 40
REWINDS = 100
"""So many of the newest restores are looked at: those that are recoveries are marked in curves."""


def read_spark(files: RunFiles) -> list[float | None]:
    """Mean rewards of at most `SPARK_POINTS` steps."""
    steps, _ = files.thinned(STEP, SPARK_POINTS)
    return [finite(event.view["reward_mean"]) for event in steps if isinstance(event, ev.StepCommitted)]


def read_curves(files: RunFiles, points: int) -> CurvesView:
    """At most `points` steps at even distances, the newest one among them."""
    steps, total = files.thinned(STEP, points)
    evaluations, _ = files.thinned(EVALUATION, points)
    views = [StepView.from_json(event.view) for event in steps if isinstance(event, ev.StepCommitted)]
    rows = [step_scalars(view) for view in views]
    names = sorted({name for row in rows for name in row})
    made = [event.view for event in evaluations if isinstance(event, ev.Evaluated)]
    restores = files.newest(RESTORE, REWINDS)
    return CurvesView(
        steps=[view.step for view in views],
        series={name: [finite(row.get(name)) for row in rows] for name in names},
        evaluations=[
            ScorePointView(step=view["step"], kind=view["kind"], score=finite(view["score"])) for view in made
        ],
        rewinds=[
            RewindView(step=event.frontier_step, time=event.at)
            for event in reversed(restores)
            if isinstance(event, ev.VersionRestored) and event.recovery
        ],
        total=total,
        event=files.last_figure(),
    )
