"""The life of a run as one pure reducer: what is wanted of it (`intent`), its `state`, and what it holds.

Each field has one writer: users, or the coordinator as `system`, append intents; the run's controller appends
states. Knows no instance and no clock.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage
from headrace_coordinator.domain.run_states import (
    ACTIONS,
    CANCEL,
    FOLLOWS,
    PAUSE,
    PAUSE_NOW,
    PLANNING,
    QUEUED,
    RUN,
    RUNNING,
    TERMINAL,
    Action,
    IllegalIntent,
    IllegalTransition,
)
from headrace_coordinator.domain.totals import Totals

STALLED = "progress"
"""Key, among a run's warnings, of the one that its step stands still."""
EVALUATED_KEPT = 256
"""Names of evaluations that are kept: a rewind abandons fewer."""
SWITCH_SHARE = 1.0
"""A run keeps its instances at least this many times as long as its last start took."""


class Grant(msgspec.Struct):
    """What a run may use: incarnations of its rollouts, trainers and helpers, and devices."""

    rollouts: list[str] = []
    trainers: list[str] = []
    devices: list[str] = []
    helpers: list[str] = []

    @property
    def instances(self) -> list[str]:
        """All incarnations."""
        return [*self.rollouts, *self.trainers, *self.helpers]


class Uploads(msgspec.Struct):
    """What a run's store has of its checkpoints."""

    saved: int = 0
    """Steps in the newest checkpoint on disk."""
    name: str = ""
    """Of the newest one that is whole in the store."""
    step: int = 0
    """Steps in it."""
    seconds: float = 0.0
    """How long its upload took."""
    size: int = 0
    skipped: int = 0
    """Checkpoints that were not uploaded, as newer ones waited already."""
    problem: str = ""
    """Why the last upload failed; empty once one succeeds."""

    def fold(self, event: ev.CheckpointUploaded | ev.UploadSkipped | ev.UploadFailed) -> None:
        """Follows from an event."""
        match event:
            case ev.CheckpointUploaded(name=name, step=step):
                self.name, self.step, self.seconds, self.size = name, step, event.seconds, event.size
                self.problem = ""
            case ev.UploadSkipped():
                self.skipped += 1
            case ev.UploadFailed(reason=reason):
                self.problem = reason


class SuiteEvaluation(msgspec.Struct):
    """The request of a run that evaluates, its progress and its result."""

    spec: dict[str, Any]
    model: str
    items: int
    versions: dict[str, str] = {}
    checkpoint_run: str = ""
    checkpoint_step: int | None = None
    checkpoint_directory: str = ""
    """Directory of the checkpoint; empty: the model's own weights."""
    policy: str = ""
    """Which of the policies that it holds; empty: the run's own one."""
    digest: str = ""
    """Digest of the weights; empty: not read yet."""
    answers: int = 0
    result: dict[str, Any] | None = None

    @property
    def total(self) -> int:
        """Answers to make."""
        samples: int = self.spec["samples"]
        return self.items * samples


class RunState(msgspec.Struct):
    """One run."""

    id: str
    spec: dict[str, Any]
    directory: str
    ledger: SlotLedger
    lineage: Lineage
    created_at: float
    state: str = QUEUED
    reason: str = "submitted"
    intent: str = RUN
    grant: Grant | None = None
    queued_at: float = 0.0
    admitted_at: float = 0.0
    planned_at: float = 0.0
    switch_s: float = 0.0
    share_s: float = 0.0
    share_at: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    steps_total: int = 0
    warmup_steps: int = 0
    layout: str = ""
    trainer_group_generation: int = 0
    trainer_group: list[str] = []
    recoveries: int = 0
    recoveries_in_a_row: int = 0
    high_step: int = 0
    rewound_steps: int = 0
    evaluated: list[str] = []
    last_checkpoint: int = 0
    checkpoint_at: float = 0.0
    """When the newest checkpoint was durable; 0: there is none."""
    export_path: str = ""
    origin_checkpoint: str = ""
    """Name of the checkpoint of another run that this one began with."""
    dataset_digest: str = ""
    totals: Totals = msgspec.field(default_factory=Totals)
    checkpoints: list[tuple[str, int]] = []
    uploads: Uploads = msgspec.field(default_factory=Uploads)
    evaluation: SuiteEvaluation | None = None
    """None for a run that trains."""
    plan: ev.PlanAdopted | None = None
    """How it uses its devices; None: as its spec says, or collocated where the spec says auto."""
    fitted: ev.PolicyFitted | None = None
    """The policy of an embodied run, once its environment is known."""
    proposal: str = ""
    """A faster plan, in words, of a run whose plan only its user changes."""
    changed_ranks: int = 0
    """Ranks of its trainer group since that was changed; 0: those of its spec."""
    wanted_ranks: int = 0
    """Ranks from the next step on; 0: no change."""
    ranks_reason: str = ""
    """Why they were changed last."""
    warnings: dict[str, str] = {}
    """What makes it learn nothing, by what that is about; with STALLED, that its step stands still."""
    deaths: dict[str, ev.DeathCharged] = {}
    """The last death of a shared instance that was charged to it, by kind of instance."""
    follows: list[str] = []
    """The runs before it, in order."""
    begins_with: str = ""
    """The export of the last of them, once there is one."""
    regrouped_at: float = 0.0
    gave_at: float = 0.0
    """When its trainer group changed last, and when it last did for another run."""
    owner: str = "admin"
    team: str = ""
    visibility: str = "private"
    """Who sees it: private, team or fleet."""

    @property
    def awaited(self) -> str:
        """The run whose export it waits for; empty for one that may begin."""
        return self.follows[-1] if self.follows and not self.begins_with else ""

    @property
    def progress(self) -> int:
        """Rises with each step that is made for the first time, and with each answer of an evaluation."""
        return self.high_step + (self.evaluation.answers if self.evaluation else 0)

    def held_s(self, now: float) -> float:
        """Device-seconds since what it holds has changed last."""
        if self.grant is None:
            return 0.0
        return max(0.0, now - self.share_at) * max(len(self.grant.devices), 1)

    def share(self, now: float) -> float:
        """Device-seconds used, over the run's weight; a run that is new to the queue starts at the others' least."""
        held = max(0.0, now - self.share_at) if self.grant is not None else 0.0
        return self.share_s + held * self._rate()

    def _rate(self) -> float:
        return max(len(self.grant.devices), 1) / self.weight if self.grant is not None else 0.0

    @property
    def ranks(self) -> int:
        """Ranks of its trainer group, where it trains."""
        return self.changed_ranks or self.own_ranks

    @property
    def own_ranks(self) -> int:
        """Ranks that its spec names."""
        return self._section("trainer", "ranks", 1)

    @property
    def sizes(self) -> list[int]:
        """Numbers of ranks that it may change to by itself, ascending: those that divide a step's groups evenly."""
        own, trainer = self.own_ranks, self.spec.get("trainer", {})
        least, most = trainer.get("min_ranks") or own, trainer.get("max_ranks") or own
        prompts: int = self._section("algorithm", "prompts_per_step", 1)
        return [ranks for ranks in range(least, most + 1) if prompts % ranks == 0 or ranks == own]

    @property
    def priority(self) -> int:
        """Runs of a higher priority come first."""
        priority: int = self.spec.get("scheduling", {}).get("priority", 0)
        return priority

    @property
    def weight(self) -> float:
        """Share among runs of equal priority."""
        weight: float = self.spec.get("scheduling", {}).get("weight", 1.0)
        return weight

    @property
    def quantum_s(self) -> float:
        """Seconds that the run keeps what it was granted before it yields to another run."""
        wanted: float = self.spec.get("scheduling", {}).get("quantum_s", 60.0)
        return max(wanted, SWITCH_SHARE * self.switch_s)

    def apply(self, event: ev.Event) -> None:
        """Folds one event into the run and its parts."""
        self._count_progress(event)
        ledger = self.ledger
        ledger.apply(event)
        self.lineage.apply(event)
        self.totals.apply(event, ledger.shape)
        match event:
            case ev.RunIntentChanged():
                self.intent = event.intent
            case ev.RunStateChanged():
                self._move(event)
            case ev.RunAdmitted():
                self._hold(event.at, _grant_of(event))
                if isinstance(event, ev.TrainersChanged):
                    self._regroup(event)
            case ev.RanksWanted(ranks=ranks):
                self.wanted_ranks = 0 if ranks == self.ranks else ranks
                if self.grant is None and self.wanted_ranks:
                    self._take_ranks(ranks)
            case ev.RunReleased():
                self._hold(event.at, None)
                if self.wanted_ranks:
                    self._take_ranks(self.wanted_ranks)
                elif len(self.sizes) > 1 and self.ranks > self.own_ranks:
                    self.changed_ranks = 0  # It queues for the ranks of its spec, and grows again later.
            case ev.PolicyFitted():
                self.fitted = event
            case ev.PlanProposed():
                self.proposal = event.reason
            case ev.PlanAdopted():
                self.plan, self.proposal = event, ""
            case ev.TrainerGroupFormed():
                self.trainer_group_generation, self.trainer_group = event.generation, list(event.trainers)
            case ev.LayoutChosen():
                self.layout = event.layout
            case ev.VersionRestored():
                self.warmup_steps = event.warmup_steps or self.warmup_steps
                self.layout = event.layout
                self.origin_checkpoint = event.checkpoint if event.source_run else self.origin_checkpoint
                self.evaluated = [key for key in self.evaluated if _ordinal_of(key) <= event.ordinal]
                self._prune()
            case ev.StepCommitted():
                self._prune()
            case ev.RunRecovering():
                self.recoveries += 1
                self.recoveries_in_a_row += 1
            case ev.Evaluated(view=view):
                self.evaluated.append(evaluation_key(view["kind"], view["step"]))
                del self.evaluated[:-EVALUATED_KEPT]
            case ev.CheckpointSaved():
                self.last_checkpoint, self.checkpoint_at = event.number, event.at
                self.checkpoints.append((event.name, event.number))
                del self.checkpoints[: -self._section("checkpoint", "keep", 1)]
                self.uploads.saved = event.step
            case ev.CheckpointUploaded() | ev.UploadSkipped() | ev.UploadFailed():
                self.uploads.fold(event)
            case ev.EvaluationProgressed() if self.evaluation:
                self.evaluation.answers, self.evaluation.digest = event.answers, event.digest
                self.evaluation.versions |= event.versions
            case ev.SuiteEvaluated() if self.evaluation:
                self.evaluation.result = event.result
            case ev.DatasetOpened(digest=digest):
                self.dataset_digest = digest
            case ev.Warned(warnings=warnings):
                self.warnings = warnings
            case ev.DeathCharged(kind=kind):
                self.deaths[kind] = event
            case ev.RunFollowed(path=path):
                self.begins_with = path
                self.spec = {**self.spec, "model": {**self.spec["model"], **of_export(path)}}
            case ev.ModelExported(path=path):
                self.export_path = path

    def _regroup(self, event: ev.TrainersChanged) -> None:
        self._take_ranks(event.ranks)
        self.ranks_reason, self.regrouped_at = event.reason, event.at
        self.gave_at = event.at if event.given_to else self.gave_at

    def _take_ranks(self, ranks: int) -> None:
        self.changed_ranks = ranks
        if self.wanted_ranks == ranks:
            self.wanted_ranks = 0

    def _prune(self) -> None:
        pinned = {number for _, number in self.checkpoints}
        self.lineage.prune(self._section("algorithm", "max_staleness", 0), pinned)

    def _section(self, section: str, key: str, default: int) -> int:
        value: int = self.spec.get(section, {}).get(key, default)
        return value

    def _count_progress(self, event: ev.Event) -> None:
        """Recoveries count in a row until the highest step rises beyond what rewinds took away since."""
        match event:
            case ev.VersionRestored(frontier_step=frontier):
                self.rewound_steps += max(0, self.ledger.step - frontier)
            case ev.StepCommitted() | ev.StepSkipped():
                reached = self.ledger.step + 1
                if reached - self.high_step > self.rewound_steps:
                    self.high_step, self.rewound_steps, self.recoveries_in_a_row = reached, 0, 0
            case ev.EvaluationProgressed() if self.evaluation and event.answers > self.evaluation.answers:
                self.recoveries_in_a_row = 0

    def _hold(self, now: float, grant: Grant | None) -> None:
        self.share_s, self.share_at = self.share(now), now
        if self.grant is None:
            self.admitted_at = now
        self.grant = grant

    def _move(self, event: ev.RunStateChanged) -> None:
        if event.state == RUNNING and self.state == PLANNING and self.planned_at:
            self.switch_s = max(0.0, event.at - self.planned_at)
        self.state, self.reason = event.state, event.reason
        if event.state == PLANNING:
            # The first start also loads the model and warms it up: it says nothing about the next ones.
            self.planned_at = event.at if self.lineage.head else 0.0
            self.started_at = self.started_at or event.at
        if event.state == QUEUED:
            self.queued_at = event.at
        if event.state in TERMINAL:
            self.finished_at = event.at


def of_export(path: str) -> dict[str, Any]:
    """What the `model` of a spec says where the run begins with an export."""
    return {"path": path, "policy": None, "revision": None, "gguf_file": None}


def _grant_of(event: ev.RunAdmitted) -> Grant:
    found = (event.rollouts, event.trainers, event.devices, event.helpers)
    return Grant(*map(list, found))


def next_action(run: RunState) -> Action:
    """What the run's controller does next: defined for every pair of state and intent."""
    return ACTIONS[run.state][run.intent]


def checkpoint_words(run: RunState) -> str:
    """What a cancelled run leaves behind, in words."""
    if run.evaluation is not None:
        return f"the {run.evaluation.answers} answers that it had stay"
    return "its last checkpoint stays" if run.last_checkpoint else "it has no checkpoint"


def evaluation_key(kind: str, ordinal: int) -> str:
    """Names an evaluation that has been done."""
    return f"{kind}@{ordinal}"


def _ordinal_of(key: str) -> int:
    return int(key.rpartition("@")[2])


def plan_intent(run: RunState, intent: str, author: str, reason: str) -> list[ev.Event]:
    """The event that changes what is wanted of a run; nothing when that is wanted already.

    Raises `IllegalIntent`: the run has ended, is being cancelled, or only its user can resume it.
    """
    if run.state in TERMINAL:
        raise IllegalIntent(f"run {run.id} is {run.state}: it has ended")
    if run.intent == CANCEL and intent != CANCEL:
        raise IllegalIntent(f"run {run.id} is being cancelled, which cannot be taken back")
    if run.intent == intent or (run.intent == PAUSE_NOW and intent == PAUSE):
        return []
    return [ev.RunIntentChanged(run=run.id, intent=intent, author=author, reason=reason)]


def plan_move(run: RunState, state: str, reason: str) -> list[ev.Event]:
    """The event that moves a run; nothing when it is there already; raises `IllegalTransition`."""
    if run.state == state:
        return []
    if state not in FOLLOWS[run.state]:
        raise IllegalTransition(f"run {run.id} is {run.state}; it cannot become {state}")
    return [ev.RunStateChanged(run=run.id, state=state, reason=reason)]
