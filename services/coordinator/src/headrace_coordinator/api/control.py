"""What the HTTP API may ask of the coordinator.

Implemented by `coordinator.Coordinator`, and by a fake in tests of the API.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol, TypeVar

from headrace_schema.changing import RunChange
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.resources.evaluations import ComparisonView, EvaluationRunView, VideoListView
from headrace_schema.resources.overviews import CurvesView, FlowView, RunSummaryView
from headrace_schema.resources.views import (
    CertificateView,
    CheckpointView,
    DeviceView,
    EvaluationView,
    EventView,
    HealthView,
    InstanceView,
    KeyProblemView,
    LeaseView,
    RunView,
    StepView,
)
from headrace_schema.spec import RunSpec

Entry = TypeVar("Entry")
Place = TypeVar("Place")
Page = tuple[list[Entry], Place | None]
"""Entries of a list, and where the next page begins, or None at the end."""


class Refused(Exception):
    """A request that the coordinator's state does not allow.

    `reason` is a constant such as NOT_FOUND, CONFLICT, INVALID or UNAVAILABLE; `problems` name keys and fixes.
    """

    def __init__(self, reason: str, message: str, problems: list[KeyProblemView] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.problems = problems or []


class Control(Protocol):
    """The coordinator as the HTTP API sees it. Writes return once they are durable (G8)."""

    async def check(self, spec: RunSpec) -> list[KeyProblemView]:
        """What the fleet as it is now cannot satisfy, its scorers tried out; empty when the run could start."""

    def settle(self, spec: RunSpec) -> tuple[RunSpec, str]:
        """The spec with what it leaves to the fleet, and why that; empty where it leaves nothing."""

    async def submit(self, spec: RunSpec, idempotency_key: str) -> RunView:
        """Queues a run. The same key with the same spec returns the same run; with another spec: CONFLICT."""

    async def check_evaluation(self, asked: EvaluationSpec) -> list[KeyProblemView]:
        """What does not fit of an evaluation: its suite, its checkpoint, the fleet; empty when it could start."""

    async def submit_evaluation(self, asked: EvaluationSpec, idempotency_key: str) -> EvaluationRunView:
        """Queues an evaluation, as `submit` queues a run."""

    def suite_evaluations(self, size: int, after: str = "") -> Page[EvaluationRunView, str]:
        """Evaluations behind evaluation `after`, newest first; ValueError when it is not one of the list."""

    def suite_evaluation(self, evaluation_id: str) -> EvaluationRunView:
        """One evaluation; NOT_FOUND names the nearest id, or says that it is a run that trains."""

    async def compare_evaluations(self, first: str, second: str) -> ComparisonView:
        """Second minus first, item by item. INVALID for evaluations that cannot be compared, with the reason."""

    async def evaluation_videos(self, evaluation_id: str) -> VideoListView:
        """The videos of an evaluation; NOT_FOUND as `suite_evaluation`."""

    async def evaluation_video(self, evaluation_id: str, name: str) -> Path:
        """The file of a video; NOT_FOUND names those that there are."""

    async def evaluation_episode(self, evaluation_id: str, name: str) -> Path:
        """The file of the episode that a video shows, an ActionSegment; NOT_FOUND as `evaluation_video`."""

    def runs(
        self, size: int, after: str = "", states: frozenset[str] = frozenset(), oldest_first: bool = False
    ) -> Page[RunView, str]:
        """Runs behind run `after`, newest first, in one of the `states`, or in any when there are none.

        ValueError when there is no run `after`; its own state does not matter, so that a page stays valid.
        """

    async def summaries(
        self, size: int, after: str, states: frozenset[str], search: str
    ) -> tuple[list[RunSummaryView], str | None, int]:
        """(runs in short behind run `after`, newest first; where the next page begins; how many match).

        Those in one of the `states`, or in any when there are none, whose id contains `search`. ValueError when
        `after` does not match.
        """

    async def curves(self, run_id: str, points: int) -> CurvesView:
        """Figures of at most `points` steps of the live lineage."""

    async def newest_events(self, run_id: str, size: int, before: int) -> Page[EventView, int]:
        """Events with ids below `before`, newest first, with the number of slots in place of lists of them."""

    def flow(self, run_id: str) -> FlowView:
        """Where the slots of the step in hand stand."""

    def run_states(self) -> dict[str, int]:
        """How many runs there are by state."""

    def run(self, run_id: str) -> RunView:
        """One run; NOT_FOUND names the nearest id."""

    async def pause(self, run_id: str, now: bool, idempotency_key: str) -> RunView:
        """Pauses after the current step, or at once (the step's attempt is aborted)."""

    async def resume(self, run_id: str, idempotency_key: str) -> RunView:
        """Goes on with a paused run."""

    async def change(self, run_id: str, change: RunChange, idempotency_key: str) -> RunView:
        """Changes a run from its next step on. INVALID or CONFLICT where that does not fit, with what would."""

    async def cancel(self, run_id: str, idempotency_key: str) -> RunView:
        """Ends a run; the checkpoints that it has stay."""

    def events(self, run_id: str, after: int) -> AsyncIterator[EventView]:
        """Events with ids above `after`, then live ones; ends when the run has ended and all were sent."""

    async def steps(self, run_id: str, size: int, after: int = -1) -> Page[StepView, int]:
        """Committed steps of the live lineage behind a position, oldest first."""

    async def evaluations(self, run_id: str, size: int, after: int = -1) -> Page[EvaluationView, int]:
        """Evaluations of the live lineage behind a position, oldest first."""

    async def certificates(self, run_id: str, size: int, after: int = -1) -> Page[CertificateView, int]:
        """Certificates behind a position, oldest first, abandoned ones included; fewer where they are large."""

    async def checkpoints(self, run_id: str) -> list[CheckpointView]:
        """Durable checkpoints, newest first."""

    def instances(self) -> list[InstanceView]:
        """All instances."""

    def leases(self) -> list[LeaseView]:
        """All leases."""

    def devices(self) -> list[DeviceView]:
        """All devices."""

    def health(self) -> HealthView:
        """How the coordinator itself is."""

    async def drain(self, name: str, idempotency_key: str) -> str:
        """Takes an instance out of use in order; its process then ends. Returns its incarnation.

        NOT_FOUND names the nearest instance; UNAVAILABLE for one that is not connected.
        """

    async def scale(self, kind: str, count: int, idempotency_key: str) -> int:
        """Sets the number of processes of a kind with the supervisor that can; does not wait for them.

        UNAVAILABLE where no supervisor can; INVALID, with the figures, for more than its host can hold.
        """
