"""What lists and plots show: runs in short, curves of a run as columns, its newest events. Knows no page's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from pydantic import Field

from headrace_schema.resources.resource import Resource
from headrace_schema.resources.views import EventView, RunBrief, RunView

EVERY_COLUMN = "*"
LONGEST_VALUE = 200
"""Characters of a column's value."""


class RunSummaryView(RunBrief):
    """One run in a list."""

    reward_mean: float | None = Field(description="of the newest step; null before the first one")
    score: float | None = Field(description="of the newest held-out evaluation; null before the first one")
    rewards: list[float | None] = Field(description="mean rewards of steps at even distances, oldest first")
    algorithm: str = Field(default="", description="of its update; empty: an evaluation of a suite")
    seed: int = 0
    family: str = Field(default="", description="the same for runs whose specs differ in the seed alone")
    values: dict[str, bool | int | float | str | None] = Field(
        default={},
        description="what the run has of the columns that were asked for: keys of its spec (`optimizer.lr`), figures "
        "of its newest step (`figures.entropy`, `stage_s.learn`), scores by kind (`scores.heldout`)",
    )


def columns_of(run: RunView, names: Sequence[str]) -> dict[str, bool | int | float | str | None]:
    """What a run has of the columns, with EVERY_COLUMN all that it has; lists as JSON."""
    last = run.last_step
    step = {"figures": last.figures, "stage_s": last.stage_s} if last else {}
    scores = {view.kind: view.score for view in run.evaluations}
    found = dict(_flat("", {**run.spec, **step, "scores": scores}))
    return found if EVERY_COLUMN in names else {name: found[name] for name in names if name in found}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not prefix):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else key, item)
    elif isinstance(value, float):
        yield prefix, value if isfinite(value) else None
    elif isinstance(value, list | dict):
        yield prefix, json.dumps(value)[:LONGEST_VALUE]
    else:
        yield prefix, value[:LONGEST_VALUE] if isinstance(value, str) else value


class RunSummaryListView(Resource):
    """A page of runs in short, newest first."""

    summaries: list[RunSummaryView]
    total: int = Field(description="runs that match, on all pages")
    states: dict[str, int] = Field(description="number of runs by state, whether they match or not")
    next_page_token: str = ""


class ScorePointView(Resource):
    """The score of one evaluation."""

    step: int
    kind: str
    score: float | None


class RewindView(Resource):
    """A recovery: after a failure, or with steps undone, the run went on from a checkpoint. A yield is none."""

    step: int = Field(description="steps in the checkpoint; what was made after them was made again")
    time: float = Field(description="seconds since the epoch")


class CurvesView(Resource):
    """Figures of the live lineage by step: every list in `series` is as long as `steps`."""

    steps: list[int]
    series: dict[str, list[float | None]] = Field(
        description="by TensorBoard's tags: train/reward, trainer/loss, stage_seconds/generate, …; null: no figure"
    )
    evaluations: list[ScorePointView]
    rewinds: list[RewindView] = Field(default=[], description="the newest recoveries, oldest first")
    total: int = Field(description="committed steps; more than are listed once they are thinned out")
    event: int = Field(description="id of an event; those after it are not all in the curves")


class RewardsView(Resource):
    """How the rewards of the stored trajectories are spread, by step."""

    steps: list[int] = Field(description="the newest ones, oldest first")
    edges: list[float] = Field(
        description="of the bins, from the least reward to the largest; none: no reward"
    )
    counts: list[list[int]] = Field(description="for each step the trajectories in each bin")


class EventListView(Resource):
    """A page of events, newest first, without lists of slots."""

    events: list[EventView]
    next_page_token: str = ""


class FlowView(Resource):
    """Where the slots of the step in hand stand: each is counted once. All 0 between two steps."""

    step: int = Field(description="the step in hand, counted from 1")
    slots: int = Field(description="slots of the step, those of refilled groups included")
    waiting: int = Field(description="wait for a rollout")
    generating: int = Field(description="a rollout has them")
    scoring: int = Field(description="wait for their reward, or for the rest of their group's")
    scored: int = Field(description="in groups that wait for the trainer")
    learned: int = Field(description="the trainer has them")
    dropped: int
    holders: dict[str, int] = Field(description="slots in generation by instance")


class TimelinePartView(Resource):
    """A step, an evaluation or the end of a run's time on its devices."""

    kind: str = Field(description="prepare, step, skipped, evaluation or leave")
    step: int = Field(description="the step, counted from 1; of an evaluation the step that it follows")
    start: float = Field(description="seconds since the epoch")
    end: float


class WorkView(Resource):
    """What was done, on which devices."""

    stage: str = Field(description="generate, score, learn, sync, switch, checkpoint or evaluate")
    devices: list[str] = Field(description="empty for work that needs none")
    start: float
    end: float
    step: int


class HoldView(Resource):
    """One lease from its grant to its end."""

    epoch: int
    instance: str
    stage: str
    devices: list[str]
    start: float
    end: float | None = Field(description="null while it is held")
    cause: str = Field(description="why it ended; empty while it is held")


class LabelView(Resource):
    """What some devices did in a time, or waited for."""

    stage: str = Field(description="the stage that has the devices; - where the run has no lease on them")
    label: str = Field(
        description="decode (prefill is in it), train, work, sync, switch, or wait for data, reward, tail or lease"
    )
    instance: str = Field(description="who held them; empty: nobody of the run")
    devices: list[str] = Field(description="empty for work that needs none, such as scoring")
    start: float = Field(description="seconds since the epoch")
    end: float


class TailView(Resource):
    """How often the trainer of an asynchronous run waited for the longest answers of its step."""

    max_staleness: int
    steps: int
    waited: int = Field(description="of these steps those with a wait of at least 1% of a step")
    longest_s: float = Field(description="longest wait of a step")
    enough: int | None = Field(
        description="the least max_staleness that would have ended the waits, an estimate; null: none up to 16"
    )


class TimelineView(Resource):
    """Who held which device when, and what was done there."""

    parts: list[TimelinePartView] = Field(description="oldest first")
    work: list[WorkView]
    holds: list[HoldView] = Field(description="leases that overlap the parts, oldest first")
    labels: list[LabelView] = Field(
        default=[], description="at any time of a part each device is in one of these; empty unless asked for"
    )
    tail: TailView | None = Field(
        default=None, description="of the steps; null where no answer is made ahead"
    )
    older: bool = Field(description="whether there are parts before the first one")


class LogLineView(Resource):
    """One line of an instance's log."""

    level: str = Field(description="debug, info, warning, error or critical")
    time: float | None = Field(description="seconds since the epoch; null where the line does not say")
    text: str


class LogView(Resource):
    """The newest lines of an instance's log."""

    instance: str
    lines: list[LogLineView] = Field(description="oldest first")
