"""What every part of a run shares: its spec, state, workers, data and small conversions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace.trainer.v1 import trainer_pb2 as trainer
from headrace_schema.resources.evaluations import EvaluationView
from headrace_schema.resources.views import StepView
from headrace_schema.spec import RunSpec
from headrace_servicekit.tracing import is_tracing, record

from headrace_coordinator.data.curriculum import Curriculum
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slot_index import ACCUMULATED, FILTERED, Slot
from headrace_coordinator.domain.run_states import WORK
from headrace_coordinator.domain.runs import RunState, evaluation_key, next_action
from headrace_coordinator.domain.totals import step_index
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.instance_client import WorkerClient
from headrace_coordinator.projections.timeline import Hold, Kind, Part, Span
from headrace_coordinator.projections.trajectories import SettledTrajectory
from headrace_coordinator.run.devices.handover import DeviceHandover
from headrace_coordinator.run.devices.leasing import WorkerLeases
from headrace_coordinator.run.modality import Asked, modality_of
from headrace_coordinator.run.recording import StepRecording
from headrace_coordinator.run.staffing import Staffing
from headrace_coordinator.run.step.tail import Tail
from headrace_coordinator.run.step.timer import StepTimer
from headrace_coordinator.run.step.warnings import Warnings
from headrace_coordinator.run.uploads import Uploads
from headrace_coordinator.run.workers.group import WorkerGroup
from headrace_coordinator.store.event_log import EventLog

ITEMS_AHEAD = 4
"""Steps whose items are at hand before one begins: it may take prompts in place of dropped ones."""


class Unwritable(Exception):
    """The disk refuses what the run has to write; the message says what, where and how large. The run pauses."""


class Projection(Protocol):
    """Writes the derived files of a run. `trouble`: why the disk refuses them now; "" when it does not."""

    trouble: str

    def spec(self, spec: dict[str, Any]) -> None:
        """Writes the spec that was submitted."""

    def step(self, view: StepView) -> None:
        """Writes one committed step."""

    def evaluation(self, view: EvaluationView) -> None:
        """Writes one evaluation."""

    def trajectories(
        self, views: list[SettledTrajectory], images: Mapping[int, tuple[bytes, ...]] | None = None
    ) -> None:
        """Writes the settled trajectories of one step."""

    def timeline(self, part: Part) -> None:
        """Writes what was done since the last part, and which leases were held."""

    def close(self) -> None:
        """Ends the files."""


class RunContext:
    """One run at work."""

    def __init__(
        self,
        event_log: EventLog,
        fleet: Fleet,
        run_id: str,
        spec: RunSpec,
        dataset: Dataset,
        projection: Projection,
    ) -> None:
        self.event_log = event_log
        self.fleet = fleet
        self.run_id = run_id
        self.spec = spec
        self.dataset = dataset
        self.projection = projection
        self.workers = WorkerGroup(fleet, run_id, self.spec)
        self.leases = WorkerLeases(self.workers)
        self.modality = modality_of(self.workers, self.leases, dataset)
        self.staffing = Staffing(self.workers, self.modality, self.leases)
        self.devices = DeviceHandover(self.leases, self.staffing)
        # Set again whenever ledger, trainer and rollouts have been brought to one version.
        self.agreement_due = True
        self.recording = StepRecording(self)
        self.uploads = Uploads(self)
        self.decision: asyncio.Task[Any] | None = None
        """The commit of the open step, from the request until it is recorded; never cancelled on purpose."""
        self.snapshot: asyncio.Task[None] | None = None
        """The start of a checkpoint, while rollouts work: until the trainer has its copy."""
        self.without_figure: set[tuple[str, int]] = set()
        """Evaluations that had too few answers, by kind and number of the version: they are not made again."""
        self.last_loss = ""
        """What was said last of an instance that failed a call or is lost."""
        self.judged = False
        """Whether an answer got a verdict since the coordinator started; the run's totals know of the steps before."""
        """The run's user was told of an answer that a scorer failed at."""
        self.failed_in_a_row = 0
        """Groups that environments failed at since the last episode that ended well."""
        self.closed = False
        """The loop of a session has ended it, and all of its calls are executed."""
        self.regrouping = False
        """The trainer group is being changed: its leader may carry the head from one group to the next."""
        self.tail = Tail()
        self.warnings = Warnings(self.spec)
        self._lengths: dict[str, tuple[int, int]] = {}
        section = self.spec.data.curriculum
        self.curriculum = Curriculum(section, dataset) if section else None

    @property
    def state(self) -> RunState:
        """The run's durable state."""
        return self.event_log.state.runs[self.run_id]

    async def snapshot_taken(self) -> None:
        """Returns once the checkpoint that was begun last has the trainer's copy. Raises what its start raised."""
        if self.snapshot is not None:
            await self.snapshot
            self.snapshot = None

    def evaluation_due(self) -> bool:
        """Whether the head is to be evaluated, and has not been."""
        every, head = self.spec.evaluation.every, self.state.lineage.base
        ordinal = head.ordinal if head else 0
        due = ordinal == 0 or self.finished or (every > 0 and ordinal % every == 0)
        return due and any(self.unevaluated(kind) for kind in self.dataset.evaluated)

    def unevaluated(self, kind: str) -> bool:
        """Whether the head has no evaluation of a kind, and may have one."""
        head = self.state.lineage.base
        number, ordinal = (head.number, head.ordinal) if head else (0, 0)
        known = evaluation_key(kind, ordinal) in self.state.evaluated
        return not known and (kind, number) not in self.without_figure

    @property
    def finished(self) -> bool:
        """Whether all steps are made."""
        return self.closed or self.state.ledger.step >= self.spec.steps

    @property
    def begins_stage(self) -> bool:
        """Whether answers are longer from this step on (`sampling.stages`)."""
        return any(each.until_step == self.state.ledger.step for each in self.spec.sampling.stages)

    def steps_to_boundary(self) -> int:
        """Steps, from the one that is learned on, of which answers may be made: those behind an evaluation wait."""
        if next_action(self.state).kind != WORK or self.evaluation_due():
            return 0
        step, every, head = self.state.ledger.step, self.spec.evaluation.every, self.state.lineage.base
        # A stream has one limit, so no answer of the next stage of lengths is made beside those of this one.
        ends = (each.until_step for each in self.spec.sampling.stages if each.until_step > step)
        left = min(ends, default=self.spec.steps) - step
        if not every or head is None or not self.dataset.evaluated:
            return left
        return min(left, every - head.ordinal % every)

    @property
    def waits_for_batch(self) -> bool:
        """Whether learning begins once the step's answers are complete, as the algorithm or the workflow needs it."""
        return self.spec.graph.whole_batch or self.workers.leader.barrier == trainer.BARRIER_BATCH

    async def record_abort(self, reason: str) -> None:
        """Appends StepAborted for the open attempt."""
        ledger = self.state.ledger
        await self.event_log.commit(
            ev.StepAborted(
                run=self.run_id,
                step=ledger.step,
                attempt=ledger.attempt,
                reason=reason,
            )
        )

    # --- data

    def item(self, prompt: int) -> DataItem:
        """The data item of a prompt ordinal; with a curriculum, of one of the open step."""
        return self.curriculum.item(prompt) if self.curriculum else self.dataset.train_item(prompt)

    async def prepare_items(self) -> None:
        """Finds the order of the items of the next steps, of a large data set in a thread: the event loop goes on."""
        ledger, staleness = self.state.ledger, self.spec.algorithm.max_staleness
        first = ledger.prompts.start
        last = first + ITEMS_AHEAD * (1 + staleness) * ledger.prompts_per_step
        if not self.dataset.ready(first, last):
            await asyncio.to_thread(self.dataset.prepare, first, last)

    def observed(self, slots: Iterable[Slot]) -> list[ev.Observed]:
        """For a curriculum: how many answers to each item of a step passed."""
        if self.curriculum is None:
            return []
        rewards: dict[int, list[float]] = {}
        for slot in slots:
            if slot.state == ACCUMULATED or slot.reason == FILTERED:
                rewards.setdefault(slot.prompt, []).append(slot.reward)
        least = self.spec.evaluation.pass_reward
        return [
            (self.dataset.place(self.item(prompt)), sum(r >= least for r in found), len(found))
            for prompt, found in rewards.items()
        ]

    async def recall(self) -> None:
        """Tells a curriculum the pass rates of the steps in the run's history that were not rewound."""
        if self.curriculum is None:
            return
        steps: list[tuple[int, list[ev.Observed]]] = []
        after = -1
        while page := await self.event_log.history.page(self.run_id, after):
            after = page[-1][0]
            for _, event in page:
                if isinstance(event, ev.VersionRestored):
                    steps = [step for step in steps if step[0] < event.frontier_step]
                elif isinstance(event, ev.StepCommitted | ev.StepSkipped):
                    steps.append((step_index(event), event.observed))
        self.curriculum.begin(group for _, observed in steps for group in observed)

    def prompt(self, prompt: int, *, record: bool = False) -> rollout.Prompt:
        """The prompt of a prompt ordinal; `record` has its episodes recorded."""
        return self.modality.prompt(self.item(prompt), Asked(record=record))

    def images(self, prompt: int) -> list[common.Image]:
        """The images of a prompt, as its trainer gets them."""
        return list(self.prompt(prompt).images) if self.dataset.images else []

    def saw_length(self, item: DataItem, tokens: int) -> None:
        """Notes an answer's length, the estimate for later epochs."""
        answers, total = self._lengths.get(item.question, (0, 0))
        self._lengths[item.question] = (answers + 1, total + tokens)

    def expected_tokens(self, prompt: int) -> float:
        """Mean length of the item's answers so far, in tokens; the most that it may have for a new item."""
        answers, total = self._lengths.get(self.item(prompt).question, (0, 0))
        return total / answers if answers else float(self.spec.sampling.longest_at(self.state.ledger.step))

    # --- what is shown

    def keep_time(self, kind: Kind, step: int, timer: StepTimer) -> None:
        """Adds the timer's spans to the timeline, with the leases that ended; the timer restarts."""
        clock = self.event_log.now() - self.event_log.monotonic()
        for stage, devices, start, end in timer.spans() if is_tracing() else ():
            record(stage, start + clock, end + clock, devices=devices, run=self.run_id)
        self.projection.timeline(
            Part(
                kind=kind,
                step=step,
                start=timer.started + clock,
                end=self.event_log.now(),
                work=[Span(stage, on, start + clock, end + clock) for stage, on, start, end in timer.spans()],
                holds=self._ended_holds(),
                rests=[
                    Span(stage, on, start + clock, end + clock) for stage, on, start, end in timer.rests()
                ],
            )
        )
        timer.restart()

    def _ended_holds(self) -> list[Hold]:
        return [
            Hold(
                lease.epoch,
                self.fleet.readable(lease.incarnation),
                lease.stage,
                lease.devices,
                lease.since,
                end,
                cause,
            )
            for lease, end, cause in self.fleet.lease_manager.take_ended(self.run_id)
        ]

    # --- small conversions

    @property
    def disk_trouble(self) -> str:
        """Why the run's files cannot be written now; "" when they can."""
        if history := self.event_log.history.trouble:
            return f"its history below {self.event_log.history.directory(self.run_id)} waits for the disk: {history}"
        if files := self.projection.trouble:
            return f"its files below {self.state.directory} cannot be written: {files}"
        return ""

    def note(self, text: str, plain: bool = False) -> None:
        """Tells the run's user; as of trouble, unless it is `plain`."""
        self.workers.note(text, plain=plain)

    async def lost(self, worker: WorkerClient, why: str) -> None:
        """A call failed: waits a little to learn whether the instance is gone."""
        alive = await self.fleet.fate(worker.incarnation)
        self.last_loss = f"{worker.instance.instance} {'failed a call' if alive else 'is lost'}: {why}"
        self.note(self.last_loss)
