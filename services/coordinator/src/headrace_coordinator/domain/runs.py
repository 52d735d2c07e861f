"""The life of a run: which state may follow which."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.slots import SlotLedger
from headrace_coordinator.domain.totals import Totals
from headrace_coordinator.domain.versions import Lineage

QUEUED, PLANNING, RUNNING, PAUSING, PAUSED, RECOVERING, CANCELLING = (
    "QUEUED",
    "PLANNING",
    "RUNNING",
    "PAUSING",
    "PAUSED",
    "RECOVERING",
    "CANCELLING",
)
SUCCEEDED, FAILED, CANCELLED = "SUCCEEDED", "FAILED", "CANCELLED"
EVALUATED_KEPT = 256
"""Names of evaluations that were done: a rewind goes back by fewer."""
TERMINAL = frozenset({SUCCEEDED, FAILED, CANCELLED})

_ACTIVE_END = {CANCELLING, CANCELLED, FAILED}
FOLLOWS: dict[str, frozenset[str]] = {
    QUEUED: frozenset({PLANNING, *_ACTIVE_END}),
    PLANNING: frozenset({RUNNING, PAUSING, RECOVERING, *_ACTIVE_END}),
    RUNNING: frozenset({PAUSING, RECOVERING, SUCCEEDED, *_ACTIVE_END}),
    PAUSING: frozenset({PAUSED, RECOVERING, SUCCEEDED, *_ACTIVE_END}),
    PAUSED: frozenset({PLANNING, *_ACTIVE_END}),
    RECOVERING: frozenset({PLANNING, RUNNING, PAUSING, *_ACTIVE_END}),
    CANCELLING: frozenset({CANCELLED, FAILED}),
    SUCCEEDED: frozenset(),
    FAILED: frozenset(),
    CANCELLED: frozenset(),
}


class IllegalTransition(Exception):
    """A state that may not follow the present one."""


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
    started_at: float = 0.0
    finished_at: float = 0.0
    steps_total: int = 0
    warmup_steps: int = 0
    gang_generation: int = 0
    gang: list[str] = []
    recoveries: int = 0
    recoveries_in_a_row: int = 0
    evaluated: list[str] = []
    last_checkpoint: int = 0
    last_checkpoint_at: float = 0.0
    export_path: str = ""
    dataset_digest: str = ""
    totals: Totals = msgspec.field(default_factory=Totals)
    checkpoints: list[tuple[str, int]] = []

    @property
    def wants_pause(self) -> bool:
        """A user asked for a pause that is not done yet."""
        return self.state == PAUSING

    def apply(self, event: ev.Event) -> None:
        """Folds one event into the run and its parts."""
        ledger = self.ledger
        ledger.apply(event)
        self.lineage.apply(event)
        self.totals.apply(event, ledger.group_size * ledger.prompts_per_step, ledger.group_size)
        match event:
            case ev.RunStateChanged():
                self._move(event)
            case ev.GangFormed():
                self.gang_generation, self.gang = event.generation, list(event.members)
            case ev.VersionRestored():
                self.warmup_steps = event.warmup_steps or self.warmup_steps
                self.evaluated = [key for key in self.evaluated if _ordinal_of(key) <= event.ordinal]
                self._prune()
            case ev.StepCommitted():
                self.recoveries_in_a_row = 0
                self._prune()
            case ev.RunRecovering():
                self.recoveries += 1
                self.recoveries_in_a_row += 1
            case ev.Evaluated(view=view):
                self.evaluated.append(evaluation_key(view["kind"], view["step"]))
                del self.evaluated[:-EVALUATED_KEPT]
            case ev.CheckpointSaved():
                self.last_checkpoint, self.last_checkpoint_at = event.number, event.at
                self.checkpoints.append((event.name, event.number))
                del self.checkpoints[: -self._section("checkpoint", "keep", 1)]
            case ev.DatasetOpened(digest=digest):
                self.dataset_digest = digest
            case ev.ModelExported(path=path):
                self.export_path = path

    def _prune(self) -> None:
        pinned = {number for _, number in self.checkpoints}
        self.lineage.prune(self._section("algorithm", "max_staleness", 0), pinned)

    def _section(self, section: str, key: str, default: int) -> int:
        value: int = self.spec.get(section, {}).get(key, default)
        return value

    def _move(self, event: ev.RunStateChanged) -> None:
        self.state, self.reason = event.state, event.reason
        if event.state == PLANNING and not self.started_at:
            self.started_at = event.at
        if event.state in TERMINAL:
            self.finished_at = event.at


def evaluation_key(kind: str, ordinal: int) -> str:
    """Names an evaluation that has been done."""
    return f"{kind}@{ordinal}"


def _ordinal_of(key: str) -> int:
    return int(key.rpartition("@")[2])


def plan_move(run: RunState, state: str, reason: str, now: float) -> list[ev.Event]:
    """The event that moves a run; nothing when it is there already; raises `IllegalTransition`."""
    if run.state == state:
        return []
    if state not in FOLLOWS[run.state]:
        raise IllegalTransition(f"run {run.id} is {run.state}; it cannot become {state}")
    return [ev.RunStateChanged(at=now, run=run.id, state=state, reason=reason)]
