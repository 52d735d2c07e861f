"""A coordinator's HTTP API and dashboard over made-up runs: as many as a test wants, in the states that it wants.

Serves the real app on a free port; no store, no fleet. `crowd_files` writes trajectories and timelines.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

import uvicorn
from headrace_coordinator.api.http import make_app
from headrace_coordinator.api.reading.presenters import run_summary_view
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.app import Coordinator
from headrace_coordinator.domain.access import SYSTEM, Principal
from headrace_schema.changing import RunLabels
from headrace_schema.resources.access import UsageView
from headrace_schema.resources.evaluations import (
    ComparisonView,
    DifferenceView,
    EpisodeView,
    EvaluationRunView,
    EvaluationView,
    ModeView,
    SuiteResultView,
    TaskView,
    VideoListView,
    VideoView,
)
from headrace_schema.resources.fleet import DeviceView, HealthView, InstanceView, LeaseView
from headrace_schema.resources.overviews import (
    CurvesView,
    FlowView,
    RewindView,
    RunSummaryView,
    ScorePointView,
)
from headrace_schema.resources.views import (
    CertificateView,
    CheckpointView,
    CountsView,
    EventView,
    PolicyView,
    RunView,
    StepView,
)
from headrace_schema.spec import RunSpec

from harness.processes import free_port
from harness.waiting import wait_for

NOW = 1_790_000_000.0
STAGES = {"generate": 2.1, "score": 0.3, "learn": 1.4, "sync": 0.2}
SCORER = f"/home/me/{'a-project-with-a-long-name/' * 4}rewards/judge.py:score"
"""A scorer as `headrace run` submits one."""
OTHER = SCORER.replace("/rewards/", "/style/")
REASONS = {
    "SUCCEEDED": "120 steps done",
    "FAILED": f"{SCORER}: OSError: gripper 7 lost its CAN bus (judge.py:3)",
}
REWARD = {"scorers": [{"name": name} for name in ("exact", SCORER, OTHER)]}


def reward_at(step: int) -> float:
    """A curve that rises and wavers."""
    return 0.75 - 0.6 * math.exp(-step / 40) + 0.04 * math.sin(step * 1.7)


class Crowd:
    """All parts of a coordinator with runs of given (id, state), the newest first; of writes only checks and drains."""

    def __init__(self, runs: list[tuple[str, str]], evaluations: Sequence[str] = ()) -> None:
        self.states = dict(runs)
        self.evaluations = evaluations
        self.drained: list[str] = []
        self.asked: list[Any] = []
        self.data_set = ""
        """Directory of what robots imitate."""
        self.labels: dict[str, dict[str, Any]] = {}
        self.reads = self.past = self.suites = self.submissions = self.videos = self
        self.run_changes = self.instance_changes = self.vitals = self
        self.audit = self.quotas = self
        self.event_log = SimpleNamespace(state=SimpleNamespace(tokens={}))

    def record(self, *entry: Any) -> None:
        """Of the audit: nothing is kept."""

    def refused_s(self, caller: Principal) -> tuple[str, float]:
        return "", 0.0

    def stream(self, caller: Principal) -> AbstractContextManager[None]:
        return nullcontext()

    async def usage(self, caller: Principal) -> list[UsageView]:
        return []

    def owned(self, run_id: str) -> Any:
        known = run_id in self.states or run_id in self.evaluations
        return SimpleNamespace(owner=SYSTEM.name, team="", visibility="private") if known else None

    def sees(self, run_id: str) -> bool:
        return True

    def named(self, run_id: str) -> str:
        return run_id

    def discreet(self, value: Any) -> Any:
        return value

    def missing(self, run_id: str) -> Refused:
        return Refused("NOT_FOUND", f"there is no run {run_id}")

    def run_states(self) -> dict[str, int]:
        return Counter(self.states.values())

    def run(self, run_id: str) -> RunView:
        if run_id not in self.states and run_id not in self.evaluations:
            raise Refused("NOT_FOUND", f"there is no run {run_id}")
        state = self.states.get(run_id, "SUCCEEDED")
        name, _, number = run_id.rpartition("-")
        spec = {"name": name, "seed": int(number)} if name == "seeds" else {"name": run_id, "seed": 0}
        robots: dict[str, Any] = {}
        if name == "robot":
            robots = {"workflow": "embodied", "environment": {"tasks": ["push"], "videos": {"every": 3}}}
            robots |= {"model": {"policy": {"kind": "mlp"}}, "algorithm": {"name": "ppo", "group_size": 1}}
            if self.data_set:
                robots["trainer"] = {"warmup": {"demonstrations": self.data_set, "steps": 10}}
        step = {"QUEUED": 0, "SUCCEEDED": 120}.get(state, 41)
        began = time.time() - 190 if state == "RUNNING" else NOW + 9
        ended = state in ("SUCCEEDED", "FAILED", "CANCELLED")
        waits = ["1 rollout instance (0 free; held by reason-a1)"] if state == "QUEUED" else []
        return RunView(
            name=f"runs/{run_id}", id=run_id, state=state, reason=REASONS.get(state, ""), step=step, steps=120,
            place=1 if state == "QUEUED" else None, created_at=NOW, started_at=began if step else None,
            finished_at=NOW + 900 if ended else None, waiting_for=waits, policy=policy(step + 1) if step else None,
            warmup_steps=0, baseline_prefill=None, evaluations=[evaluation(0), evaluation(step)] if step else [],
            last_step=step_view(step) if step else None, recoveries=1 if state == "FAILED" else 0,
            counts=CountsView(trained=64 * step, dropped=0, duplicates=0, max_staleness=1, frontier=64 * step),
            run_directory="", export_path="", **self.labels.get(run_id, {}),
            spec={**spec, "steps": 120, "optimizer": {"lr": 3e-5 if name == "other" else 1e-5},
                "algorithm": {"name": "grpo"}, "reward": REWARD, **robots},
        )  # fmt: skip

    async def label(self, run_id: str, change: RunLabels, idempotency_key: str) -> RunView:
        self.labels[run_id] = self.labels.get(run_id, {}) | change.model_dump(exclude_none=True)
        return self.run(run_id)

    async def summaries(
        self,
        size: int,
        after: str,
        states: frozenset[str],
        search: str,
        columns: Sequence[str] = (),
        **_: Any,
    ) -> tuple[list[RunSummaryView], str | None, int]:
        found = [n for n, state in self.states.items() if search in n and (not states or state in states)]
        start = found.index(after) + 1 if after else 0
        shown = [self.run(name) for name in found[start : start + size]]
        views = [
            run_summary_view(run, [reward_at(3 * n) for n in range(run.step and 40)], columns)
            for run in shown
        ]
        return views, shown[-1].id if start + size < len(found) else None, len(found)

    async def curves(self, run_id: str, points: int) -> CurvesView:
        steps = list(range(1, self.run(run_id).step + 1))
        series: dict[str, list[float | None]] = {
            "train/reward": [reward_at(step) for step in steps],
            "trainer/reward_std": [0.2 + 0.1 * math.exp(-step / 50) for step in steps],
            "trainer/loss": [0.1 * math.cos(step) for step in steps],
            "trainer/grad_norm": [1 + 0.3 * math.sin(step) for step in steps],
            "trainer/entropy": [2 * math.exp(-step / 90) for step in steps],
            "trainer/answer_length_mean": [180 + 40 * math.sin(step / 20) for step in steps],
            "speed/tokens_per_second": [3000 + 300 * math.sin(step) for step in steps],
            "speed/tokens": [12_000.0 for _ in steps],
            "speed/step_seconds": [4.0 + 0.3 * math.sin(step) for step in steps],
            "slots/trained": [64.0 for _ in steps],
            "trainer/learning_rate": [1e-5 for _ in steps],
            "trainer/clip_fraction": [0.0 for _ in steps],
            "trainer/log_prob_mismatch_mean": [1e-7 * (1 + step % 3) for step in steps],
            "train/max_staleness": [float(step % 2) for step in steps],
            **{f"stage_seconds/{n}": [s + 0.1 * math.sin(t) for t in steps] for n, s in STAGES.items()},
        }
        scores = [
            ScorePointView(step=n, kind="heldout", score=reward_at(n)) for n in range(0, len(steps) + 1, 20)
        ]
        if not steps:
            return CurvesView(steps=[], series={}, evaluations=[], total=0, event=0)
        rewinds = [RewindView(step=20, time=NOW + 100)]
        return CurvesView(
            steps=steps, series=series, evaluations=scores, rewinds=rewinds, total=len(steps), event=9999
        )

    async def newest_events(self, run_id: str, size: int, before: int) -> tuple[list[EventView], int | None]:
        run = self.run(run_id)
        said: list[tuple[str, dict[str, Any]]] = [
            ("run_submitted", {}),
            ("noted", {"text": "6 of 64 prompts are longer than max_context"}),
        ]
        said += [("noted", {"text": "engine and trainer agree: 2.1e-07", "plain": True})]
        said += [("version_restored", {"checkpoint": "step-20", "ordinal": 20, "number": 22})]
        said += [("run_state_changed", {"state": run.state, "reason": run.reason})]
        found = [
            EventView(id=n, type=kind, time=NOW + n, run=run_id, data=data)
            for n, (kind, data) in enumerate(said, 1)
        ]
        return found[::-1], None

    async def events(self, run_id: str, after: int, *, follow: bool = True) -> AsyncIterator[EventView]:
        return
        yield

    async def certificates(
        self, run_id: str, size: int, after: int = -1, *, newest: bool = False
    ) -> tuple[list[CertificateView], None]:
        made = ahead if run_id.startswith("ahead") else certificate
        steps = [*range(1, self.run(run_id).step + 1)]
        return [made(step) for step in (steps[::-1] if newest else steps)[:size]], None

    async def checkpoints(self, run_id: str) -> list[CheckpointView]:
        step = self.run(run_id).step
        return [CheckpointView(name=f"step-{step}", version=policy(step), step=step, size_bytes=10**9)]

    def suite_evaluations(self, size: int, after: str) -> tuple[list[EvaluationRunView], None]:
        return [self.suite_evaluation(name) for name in self.evaluations][:size], None

    def suite_evaluation(self, evaluation_id: str) -> EvaluationRunView:
        if evaluation_id not in self.evaluations:
            raise Refused("NOT_FOUND", f"there is no evaluation {evaluation_id}")
        better = 0.1 * list(self.evaluations).index(evaluation_id)
        modes = [ModeView(mode=mode, score=0.5 + better, low=0.4, high=0.7) for mode in ("greedy", "pass@4")]
        tasks = [
            TaskView(task=task, variant="dim", items=6, score=0.5, low=0.2, high=0.8)
            for task in ("add", "sub")
        ]
        return EvaluationRunView(
            name=f"evaluations/{evaluation_id}", id=evaluation_id, state="SUCCEEDED", reason="12 items answered",
            created_at=NOW, started_at=NOW + 3, finished_at=NOW + 63, waiting_for=[], recoveries=0,
            suite="gsm_symbolic", model="owner/model", checkpoint_run="done-1", checkpoint_step=120, items=12,
            samples=4, answers=48, answers_total=48, versions={"reasoning-gym": "0.1.25"},
            spec={"suite": {}, "reward": REWARD},
            result=SuiteResultView(
                modes=modes, tasks=tasks, parts={"exact": 0.5 + better, "rewards/judge.py:score": 0.25},
                answers=48, truncated=0.02, tokens_mean=24.0
            ),
        )  # fmt: skip

    async def run_videos(self, run_id: str) -> VideoListView:
        """Of eval-0 the second item failed, of the others none."""
        evaluation = run_id.startswith("eval-")
        return VideoListView(
            videos=[
                VideoView(
                    name=f"000{item}-0-push-seed-{item}-success.mp4", item=item,
                    step=None if evaluation else 3, sample=0, success=(run_id, item) != ("eval-0", 2), size_bytes=4,
                )
                for item in range(1, 3 if evaluation else 2)
            ]
        )  # fmt: skip

    async def run_video(self, run_id: str, name: str) -> Path:
        return Path(__file__).parents[1] / "packaging" / "six_frames.mp4"

    async def run_steps(self, run_id: str, name: str) -> EpisodeView:
        return EpisodeView(
            actions=[[0.1 * step, -0.5] for step in range(5)], rewards=[0.0, 0.0, 0.25, 0.0, 1.0],
            successes=[False] * 4 + [True], chunk_starts=[0, 2, 4], values=[0.5, 0.75, 1.0], truncated=False,
        )  # fmt: skip

    async def compare_evaluations(self, first: str, second: str) -> ComparisonView:
        found = DifferenceView(
            mode="greedy", first=0.5, second=0.6, difference=0.1, low=-0.05, high=0.25, wins=3, losses=1, ties=8,
            p_value=0.625,
        )  # fmt: skip
        return ComparisonView(first=first, second=second, items=12, differences=[found])

    async def drain(self, name: str, idempotency_key: str) -> str:
        self.drained.append(name)
        return f"{name}.1"

    async def submit(self, asked: Any, idempotency_key: str, visibility: str = "private") -> str:
        """Keeps what was asked; the first evaluation stands in for it."""
        self.asked.append(asked)
        return self.evaluations[0]

    async def check(self, spec: RunSpec) -> Submission:
        return Submission(spec, FleetView({}, {}, []))

    def runs(
        self, size: int, after: str = "", states: frozenset[str] = frozenset(), oldest_first: bool = False
    ) -> tuple[list[RunView], None]:
        return [self.run(name) for name in list(self.states)[:size]], None

    def flow(self, run_id: str) -> FlowView:
        busy = self.run(run_id).state == "RUNNING"
        counts = {"waiting": 14, "generating": 18, "scoring": 6, "scored": 8, "learned": 16, "dropped": 2}
        holders = {"rollout-0": 10, "rollout-1": 8} if busy else {}
        places = counts if busy else dict.fromkeys(counts, 0)
        return FlowView(step=42, slots=sum(places.values()), holders=holders, **places)

    def instances(self) -> list[InstanceView]:
        return [
            InstanceView(
                name=f"{kind}-0", incarnation=f"{kind}-0.1", kind=kind, state="READY", host="box",
                address="127.0.0.1:4000", devices=["box/gpu:0"], capabilities={}, run="",
                resident_memory_bytes=10**9, last_heartbeat_age_s=0.2,
            )
            for kind in ("reward", "rollout", "trainer")
        ]  # fmt: skip

    def leases(self) -> list[LeaseView]:
        return [
            LeaseView(
                epoch=7, state="HELD", instance="rollout-0", run="", stage="generate",
                devices=["box/gpu:0"], expires_in_s=30,
            )
        ]  # fmt: skip

    def devices(self) -> list[DeviceView]:
        quarantine = "1.2 GiB in use after its lease ended"
        return [
            DeviceView(name="box/gpu:0", state="LEASED", holder="rollout-0", reason="generate"),
            DeviceView(name="box/gpu:1", state="QUARANTINED", holder="trainer-0", reason=quarantine),
            DeviceView(name="box/gpu:2", state="FREE", holder="", reason=""),
        ]

    def view(self) -> HealthView:
        return HealthView(status="ok")


def policy(number: int) -> PolicyView:
    return PolicyView(number=number, parent=number - 1, ordinal=number - 1, digest="5eed" * 16)


def evaluation(step: int) -> EvaluationView:
    return EvaluationView(
        kind="heldout",
        step=step,
        version=step + 1,
        score=reward_at(step),
        parts={},
        answers=80,
        examples=[
            {
                "prompt": "How much is 17 * 23?",
                "completion": f"It is {370 + step}.",
                "reference": "391",
                "reward": 0.0,
            }
        ],
    )


def step_view(step: int) -> StepView:
    return StepView(
        step=step, version=step + 1, wall_s=4.0, reward_mean=reward_at(step), tokens=12000, tokens_per_s=3000.0,
        stage_s=STAGES, devices={}, trained=64, dropped=0, max_staleness=1, figures={},
    )  # fmt: skip


def certificate(step: int) -> CertificateView:
    """After step 30 a rewind to step 20 abandoned ten versions."""
    parent = 21 if step == 31 else step
    version = PolicyView(number=step + 1, parent=parent, ordinal=step if step < 31 else step - 10, digest="d")
    return CertificateView(
        version=version, step=step, attempt=1, live=not 20 < step < 31, trained=[(step, n, 1) for n in range(64)],
        dropped=[], set_digest="5eed", tokens=12000, tokens_by_version={parent: 12000}, max_staleness=0,
        log_prob_mismatch_mean=1e-4, drop_rate_by_length={}, drop_rate_by_pass_rate={},
    )  # fmt: skip


def ahead(step: int) -> CertificateView:
    """Of a run with max_staleness 2: half of the tokens are of the base, and a third and a sixth of those before it."""
    version = PolicyView(number=step + 1, parent=step, ordinal=step, digest="d")
    counts = {step - lag: tokens for lag, tokens in enumerate((6000, 4000, 2000)) if lag < step}
    changed = {
        "version": version,
        "live": True,
        "tokens_by_version": counts,
        "max_staleness": len(counts) - 1,
    }
    return certificate(step).model_copy(update=changed)


class CrowdServer:
    """The app over a crowd, in a thread of this process, inside the block."""

    def __init__(self, crowd: Crowd, runs_directory: Path, **options: Any) -> None:
        port, self.crowd = free_port(), crowd
        self.url = f"http://127.0.0.1:{port}"
        app = make_app(cast(Coordinator, crowd), runs_directory=runs_directory, **options)
        config = uvicorn.Config(
            app, port=port, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: self._server.started, "the app of made-up runs", 20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(10)
