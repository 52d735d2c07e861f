"""Figures of a run's steps from its history files, thinned out evenly: curves, and sparklines of rewards."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.resources.overviews import CurvesView, RewindView, ScorePointView
from headrace_schema.resources.views import StepView

from headrace_coordinator.api.reading.presenters import finite
from headrace_coordinator.domain import events as ev
from headrace_coordinator.projections.tensorboard import step_scalars
from headrace_coordinator.store.run_files import RunFiles
from headrace_coordinator.store.run_index import Index, Range

SPARK_POINTS = 40
REWINDS = 100
"""The newest recoveries that are marked in curves."""


def read_spark(files: RunFiles) -> list[float | None]:
    """Mean rewards of at most `SPARK_POINTS` steps."""
    return [finite(event.view["reward_mean"]) for event in _steps(files, SPARK_POINTS)]


def read_curves(files: RunFiles, points: int) -> CurvesView:
    """At most `points` steps at even distances, the newest one among them."""
    newest = [record.sequence for index in (files.steps, files.evaluations) if (record := index.last())]
    views = [StepView.from_json(event.view) for event in _steps(files, points)]
    rows = [step_scalars(view) for view in views]
    names = sorted({name for row in rows for name in row})
    live = files.live_evaluations()
    found = _thinned(files, files.evaluations, live, points)
    made = [event.view for event in found if isinstance(event, ev.Evaluated)]
    return CurvesView(
        steps=[view.step for view in views],
        series={name: [finite(row.get(name)) for row in rows] for name in names},
        evaluations=[
            ScorePointView(step=view["step"], kind=view["kind"], score=finite(view["score"])) for view in made
        ],
        rewinds=list(_rewinds(files)),
        total=sum(high - low for low, high in files.live_steps()),
        event=max(newest, default=0),
    )


def _rewinds(files: RunFiles) -> Iterator[RewindView]:
    """All restores but the first one, which is of the model or the checkpoint that the run began with."""
    end = len(files.restores)
    for record in files.restores.read(max(1, end - REWINDS), end):
        event = files.event(record)
        if isinstance(event, ev.VersionRestored):
            yield RewindView(step=event.frontier_step, time=event.at)


def _steps(files: RunFiles, points: int) -> Iterator[ev.StepCommitted]:
    for event in _thinned(files, files.steps, files.live_steps(), points):
        if isinstance(event, ev.StepCommitted):
            yield event


def _thinned(files: RunFiles, index: Index, ranges: list[Range], points: int) -> Iterator[ev.Event]:
    """Events of `points` records at even distances in the ranges, the last one among them."""
    positions = [position for low, high in ranges for position in range(low, high)]
    count = len(positions)
    if count > points:
        positions = [positions[count - 1 - each * count // points] for each in reversed(range(points))]
    for position in positions:
        for record in index.read(position, position + 1):
            if event := files.event(record):
                yield event
