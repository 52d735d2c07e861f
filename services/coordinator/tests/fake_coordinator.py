"""A coordinator in memory, without a store or a fleet, for tests of the HTTP API: it is all of its parts itself."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace_coordinator.api.reading.presenters import run_summary_view
from headrace_coordinator.api.reading.reads import Page
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.rules import problems_of
from headrace_coordinator.api.submission.submission import Submission
from headrace_schema.changing import RunChange, RunLabels
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, nearest
from headrace_schema.resources.evaluations import (
    ComparisonView,
    EpisodeView,
    EvaluationRunView,
    EvaluationView,
    VideoListView,
)
from headrace_schema.resources.fleet import DeviceView, GpuUseView, HealthView, InstanceView, LeaseView
from headrace_schema.resources.overviews import CurvesView, FlowView
from headrace_schema.resources.views import (
    CertificateView,
    CheckpointView,
    CountsView,
    EndpointView,
    EventView,
    PolicyView,
    RecordingListView,
    RunView,
    StepView,
)
from headrace_schema.spec import RunSpec
from submission_parts import submission_of

SPEC: dict[str, Any] = {
    "name": "sums",
    "model": {"path": "owner/model"},
    "data": {"source": "copy_digits", "heldout": 10},
    "reward": {"scorers": [{"name": "exact"}]},
}
ENDED = {"SUCCEEDED", "FAILED", "CANCELLED"}


class FakeCoordinator:
    """Keeps runs, keys and events in memory; moves a run only when a request or a test says so."""

    def __init__(self) -> None:
        self.records: dict[str, RunView] = {}
        self.keys: dict[str, tuple[str, str]] = {}
        self.log: dict[str, list[EventView]] = {}
        self.news = asyncio.Condition()
        self.broken_after: int | None = None
        self.health = HealthView(status="ok")
        self.reads = self.past = self.suites = self.submissions = self.videos = self
        self.run_changes = self.instance_changes = self.vitals = self
        self.bounds: dict[str, Any] = {}
        self.autoscaler = self
        self.recordings = FakeRecordings(self)

    async def check(self, asked: RunSpec | EvaluationSpec) -> Submission | None:
        """Raises `Impossible`; a submission of a run."""
        if isinstance(asked, EvaluationSpec):
            return None
        capabilities = {
            "rollout": {"engines": frozenset({"transformers"})},
            "trainer": {"backends": frozenset({"fsdp"}), "algorithms": frozenset({"grpo"})},
            "reward": {"scorers": frozenset({"exact", "last_number"})},
        }
        counts = {"rollout": 1, "trainer": 1, "reward": 1}
        fleet = FleetView(capabilities, counts, ["h/cpu:0", "h/cpu:1"])
        submission = submission_of(asked, fleet)
        if problems := problems_of(submission):
            raise Impossible(problems)
        return submission

    async def submit(self, asked: RunSpec | EvaluationSpec, idempotency_key: str) -> str:
        if isinstance(asked, EvaluationSpec):
            raise Refused("INVALID", "the fleet cannot make this evaluation")
        body = asked.model_dump_json()
        if known := self.keys.get(idempotency_key):
            if known[1] != body:
                raise Refused("CONFLICT", "the key was used for another spec")
            return known[0]
        try:
            await self.check(asked)
        except Impossible as error:
            raise Refused("INVALID", "the fleet cannot run this", error.problems) from error
        run_id = f"{asked.name}-{len(self.records)}"
        self.keys[idempotency_key] = (run_id, body)
        self.records[run_id] = run_view(run_id, asked)
        self.log[run_id] = []
        return run_id

    async def emit(self, run_id: str, type: str, state: str = "RUNNING", **data: Any) -> None:
        """Adds an event and moves the run."""
        number = len(self.log[run_id]) + 1
        self.log[run_id].append(EventView(id=number, type=type, time=1.0, run=run_id, data=data))
        self.records[run_id] = self.records[run_id].model_copy(update={"state": state})
        async with self.news:
            self.news.notify_all()

    def runs(
        self, size: int, after: str = "", states: frozenset[str] = frozenset(), oldest_first: bool = False
    ) -> Page[RunView, str]:
        every = list(self.records) if oldest_first else list(reversed(self.records))
        names = [name for name in every if not states or self.records[name].state in states or name == after]
        start = names.index(after) + 1 if after else 0
        shown = names[start : start + size]
        return [self.run(name) for name in shown], shown[-1] if start + size < len(names) else None

    async def summaries(self, size: int, after: str, states: frozenset[str], search: str):
        names = [
            name
            for name in reversed(self.records)
            if search in name and (not states or self.records[name].state in states)
        ]
        start = names.index(after) + 1 if after else 0
        shown = [run_summary_view(self.run(name), [0.25, None]) for name in names[start : start + size]]
        return shown, shown[-1].id if start + size < len(names) else None, len(names)

    async def curves(self, run_id: str, points: int) -> CurvesView:
        self.run(run_id)
        return CurvesView(steps=[1], series={"train/reward": [None]}, evaluations=[], total=1, event=0)

    def suite_evaluations(self, size: int, after: str = "") -> Page[EvaluationRunView, str]:
        if after:
            raise ValueError(after)
        return [], None

    def suite_evaluation(self, evaluation_id: str) -> EvaluationRunView:
        raise Refused("NOT_FOUND", f"there is no evaluation {evaluation_id!r}")

    async def compare_evaluations(self, first: str, second: str) -> ComparisonView:
        raise Refused("NOT_FOUND", f"there is no evaluation {first!r}")

    async def run_videos(self, evaluation_id: str) -> VideoListView:
        raise Refused("NOT_FOUND", f"there is no evaluation {evaluation_id!r}")

    async def run_video(self, evaluation_id: str, name: str) -> Path:
        raise Refused("NOT_FOUND", f"there is no evaluation {evaluation_id!r}")

    async def run_episode(self, evaluation_id: str, name: str) -> Path:
        raise Refused("NOT_FOUND", f"there is no evaluation {evaluation_id!r}")

    async def run_steps(self, evaluation_id: str, name: str) -> EpisodeView:
        raise Refused("NOT_FOUND", f"there is no evaluation {evaluation_id!r}")

    def flow(self, run_id: str) -> FlowView:
        self.run(run_id)
        counts = {"waiting": 1, "generating": 2, "scoring": 1, "scored": 0, "learned": 0, "dropped": 0}
        return FlowView(step=1, slots=4, holders={"rollout-0": 2}, **counts)

    async def newest_events(self, run_id: str, size: int, before: int) -> Page[EventView, int]:
        self.run(run_id)
        found = [event for event in reversed(self.log[run_id]) if event.id < before]
        return found[:size], found[size - 1].id if len(found) > size else None

    def sessions_ended(self, run_id):
        return {"taken": 3, "lost": 1}

    def instances_wanted(self):
        return {"rollout": 2, "trainer": 1}

    def run_states(self) -> dict[str, int]:
        return Counter(run.state for run in self.records.values())

    def run(self, run_id: str) -> RunView:
        if run_id not in self.records:
            close = nearest(run_id, self.records)
            raise Refused(
                "NOT_FOUND", f"there is no run {run_id!r}" + (f"; did you mean {close}?" if close else "")
            )
        return self.records[run_id]

    def endpoint_key(self, run_id: str) -> str:
        return ""

    def endpoint(self, run_id: str, base_url: str) -> EndpointView:
        self.run(run_id)
        raise Refused("NOT_FOUND", f"run {run_id} is not online")

    def _move(self, run_id: str, state: str) -> RunView:
        if self.run(run_id).state in ENDED:
            raise Refused("CONFLICT", f"run {run_id} has ended")
        self.records[run_id] = self.records[run_id].model_copy(update={"state": state})
        return self.records[run_id]

    async def pause(self, run_id: str, now: bool, idempotency_key: str) -> RunView:
        return self._move(run_id, "PAUSED" if now else "PAUSING")

    async def resume(self, run_id: str, idempotency_key: str) -> RunView:
        return self._move(run_id, "RUNNING")

    async def cancel(self, run_id: str, idempotency_key: str) -> RunView:
        return self._move(run_id, "CANCELLED")

    async def delete(self, run_id: str, idempotency_key: str) -> None:
        if self.run(run_id).state not in ENDED:
            raise Refused("CONFLICT", f"run {run_id} has not ended")
        del self.records[run_id]

    async def change(self, run_id: str, change: RunChange, idempotency_key: str) -> RunView:
        self.records[run_id] = self.run(run_id).model_copy(update={"wanted_ranks": change.trainer.ranks})
        return self.records[run_id]

    async def label(self, run_id: str, change: RunLabels, idempotency_key: str) -> RunView:
        found = change.model_dump(exclude_none=True)
        self.records[run_id] = self.run(run_id).model_copy(update=found)
        return self.records[run_id]

    async def events(self, run_id: str, after: int) -> AsyncIterator[EventView]:
        sent = 0
        while True:
            while sent < len(self.log[run_id]):
                event = self.log[run_id][sent]
                sent += 1
                if event.id > after:
                    yield event
            if self.records[run_id].state in ENDED:
                return
            async with self.news:
                await self.news.wait()

    async def steps(self, run_id: str, size: int, after: int = -1) -> Page[StepView, int]:
        self.run(run_id)
        return cut([step_view(number) for number in range(7)], size, after)

    async def evaluations(self, run_id: str, size: int, after: int = -1) -> Page[EvaluationView, int]:
        self.run(run_id)
        return cut([evaluation_view(number) for number in range(3)], size, after)

    async def certificates(self, run_id: str, size: int, after: int = -1) -> Page[CertificateView, int]:
        self.run(run_id)
        return cut([certificate_view(number) for number in range(1, 6)], size, after)

    async def checkpoints(self, run_id: str) -> list[CheckpointView]:
        self.run(run_id)
        policy = PolicyView(number=1, parent=0, ordinal=1, digest="d")
        return [
            CheckpointView(name=f"lineage-1/step-{number}", version=policy, size_bytes=9) for number in (9, 4)
        ]

    def instances(self) -> list[InstanceView]:
        return [
            InstanceView(
                name=f"rollout-{number}",
                incarnation=f"i{number}",
                kind="rollout",
                state="READY",
                host="h",
                address="h:1",
                devices=[f"h/cpu:{number}"],
                capabilities={"engines": ["transformers"]},
                run="",
                resident_memory_bytes=1000,
                busy_cores=0.5,
                gpus=[GpuUseView(device="GPU-aa/gpu:0", busy=0.5, used_memory_bytes=9)],
                last_heartbeat_age_s=0.5,
            )
            for number in range(3)
        ]

    def leases(self) -> list[LeaseView]:
        return [
            LeaseView(
                epoch=7,
                state="HELD",
                instance="i0",
                run="",
                stage="learn",
                devices=["h/cpu:0"],
                expires_in_s=9,
            )
        ]

    def devices(self) -> list[DeviceView]:
        return [DeviceView(name="h/cpu:0", state="LEASED", holder="i0", reason="")]

    def view(self) -> HealthView:
        return self.health

    async def drain(self, name: str, idempotency_key: str) -> str:
        for instance in self.instances():
            if instance.name == name:
                return instance.incarnation
        raise Refused("NOT_FOUND", f"there is no instance {name!r}")

    async def release_device(self, device: str, idempotency_key: str) -> str:
        if device == "gpu:0":
            return "GPU-8f2a/gpu:0"
        raise Refused("NOT_FOUND", f"no device in quarantine is called {device!r}")

    async def scale(self, kind: str, count: int, idempotency_key: str, host: str = "") -> int:
        if kind == "simulator":
            raise Refused("UNAVAILABLE", "no supervisor can change the number of simulator processes")
        return count


def cut(entries, size: int, after: int):
    """A page of a list whose positions are its indices."""
    shown = entries[after + 1 : after + 1 + size]
    return shown, after + size if after + 1 + size < len(entries) else None


def run_view(run_id: str, spec: RunSpec) -> RunView:
    return RunView(
        name=f"runs/{run_id}",
        id=run_id,
        state="QUEUED",
        reason="",
        step=0,
        steps=spec.steps,
        created_at=1.0,
        started_at=None,
        finished_at=None,
        waiting_for=[],
        policy=None,
        warmup_steps=0,
        baseline_prefill=None,
        evaluations=[],
        last_step=step_view(6),
        counts=CountsView(trained=0, dropped=0, duplicates=0, max_staleness=0, frontier=0),
        recoveries=0,
        run_directory="",
        export_path="",
        spec=spec.model_dump(mode="json"),
    )


def step_view(number: int) -> StepView:
    return StepView(
        step=number,
        version=number + 1,
        wall_s=2.0,
        reward_mean=0.25,
        tokens=100,
        tokens_per_s=50.0,
        stage_s={"generate": 1.0},
        devices={},
        trained=32,
        dropped=0,
        max_staleness=0,
        figures={"loss": float("nan")},
    )


def evaluation_view(number: int) -> EvaluationView:
    return EvaluationView(
        kind="heldout",
        step=number,
        version=number + 1,
        score=0.5,
        parts={"exact": 0.5},
        answers=4,
        examples=[],
    )


def certificate_view(number: int) -> CertificateView:
    return CertificateView(
        version=PolicyView(number=number * 10, parent=0, ordinal=number, digest="d"),
        step=number,
        attempt=1,
        live=True,
        trained=[(0, 0, 1)],
        dropped=[(0, 1, "GROUP_INCOMPLETE")],
        set_digest="d",
        tokens=2,
        tokens_by_version={number: 2},
        max_staleness=0,
        log_prob_mismatch_mean=0.0,
        drop_rate_by_length={},
        drop_rate_by_pass_rate={},
    )


class FakeRecordings:
    """Of runs that keep none."""

    def __init__(self, coordinator: FakeCoordinator) -> None:
        self._coordinator = coordinator

    def all(self, run_id: str) -> RecordingListView:
        self._coordinator.run(run_id)
        return RecordingListView(recordings=[], wanted=[])

    def path(self, run_id: str, name: str) -> Path:
        self._coordinator.run(run_id)
        raise Refused("NOT_FOUND", f"run {run_id} has no recording {name!r}; it has none")

    checkpoint = path

    def ask(self, run_id: str, step: int) -> RecordingListView:
        self._coordinator.run(run_id)
        return RecordingListView(recordings=[], wanted=[step])
