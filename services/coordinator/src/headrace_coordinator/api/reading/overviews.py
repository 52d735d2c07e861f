"""Lists and curves for people: runs in short, figures by step, newest events. Reads files; knows no HTTP."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from headrace_schema.resources.overviews import CurvesView, RunSummaryView, ScorePointView
from headrace_schema.resources.views import EventView, RunView

from headrace_coordinator.api.reading import presenters as present
from headrace_coordinator.domain import events as ev
from headrace_coordinator.projections.tensorboard import step_scalars
from headrace_coordinator.store.run_files import RunFiles
from headrace_coordinator.store.run_index import Index, Range

SPARK_POINTS = 40
SPARKS_KEPT = 4096
LISTS_OF_SLOTS = ("trained", "dropped")
Spark = list[float | None]


class Sparks:
    """Sparklines of runs, read again only once a run has another version; the oldest ones are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, Spark]] = OrderedDict()

    def known(self, run: RunView) -> Spark | None:
        """The run's sparkline as of its newest version; None when it must be read."""
        version, spark = self._known.get(run.id, (-1, []))
        return spark if version == _version(run) else None

    def keep(self, run: RunView, spark: Spark) -> Spark:
        """Remembers and returns it."""
        self._known[run.id] = _version(run), spark
        self._known.move_to_end(run.id)
        while len(self._known) > SPARKS_KEPT:
            self._known.popitem(last=False)
        return spark


def _version(run: RunView) -> int:
    return run.last_step.version if run.last_step else 0


def read_spark(files: RunFiles) -> Spark:
    """Mean rewards of at most `SPARK_POINTS` steps."""
    return [_finite(event.view["reward_mean"]) for event in _steps(files, SPARK_POINTS)]


def summary(run: RunView, rewards: Spark) -> RunSummaryView:
    """A run in short."""
    scores = [view.score for view in run.evaluations if view.kind == "heldout"]
    return RunSummaryView(
        id=run.id,
        state=run.state,
        reason=run.reason,
        priority=run.priority,
        place=run.place,
        step=run.step,
        steps=run.steps,
        created_at=run.created_at,
        started_at=run.started_at,
        finished_at=run.finished_at,
        waiting_for=run.waiting_for,
        reward_mean=_finite(run.last_step.reward_mean) if run.last_step else None,
        score=_finite(scores[-1]) if scores else None,
        rewards=rewards,
        forked_from=run.forked_from,
    )


def read_curves(files: RunFiles, points: int) -> CurvesView:
    """At most `points` steps at even distances, the newest one among them."""
    newest = [record.sequence for index in (files.steps, files.evaluations) if (record := index.last())]
    views = [present.step_view(event.view) for event in _steps(files, points)]
    rows = [step_scalars(view) for view in views]
    names = sorted({name for row in rows for name in row})
    live = files.live_evaluations()
    found = _thinned(files, files.evaluations, live, points)
    made = [event.view for event in found if isinstance(event, ev.Evaluated)]
    return CurvesView(
        steps=[view.step for view in views],
        series={name: [_finite(row.get(name)) for row in rows] for name in names},
        evaluations=[
            ScorePointView(step=view["step"], kind=view["kind"], score=_finite(view["score"]))
            for view in made
        ],
        total=sum(high - low for low, high in files.live_steps()),
        event=max(newest, default=0),
    )


def read_events(files: RunFiles, size: int, before: int) -> tuple[list[EventView], int | None]:
    """(events with lower ids, newest first, without their lists of slots; where the next page begins)."""
    lines = files.segments.before(before, size + 1)
    views = [brief_event(number, ev.decode(data)) for number, data in lines[:size]]
    return views, views[-1].id if len(lines) > size else None


def brief_event(number: int, event: ev.Event) -> EventView:
    """An event with the number of slots in place of each list of them."""
    view = present.event_view((number, event))
    for part in (view.data, view.data.get("certificate", {})):
        for name in LISTS_OF_SLOTS:
            if isinstance(part.get(name), list):
                part[name] = len(part[name])
    return view


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


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and value - value == 0 else None
