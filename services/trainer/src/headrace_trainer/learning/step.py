"""The life of a step attempt as a pure reducer: (state, command) → state, or a Refusal.

Decides what is a retry, what is a conflict and what may follow what. Knows no tensors, no wire, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from enum import Enum

from headrace_schema.sections.learning import OptimizerSection
from headrace_servicekit.rpc.digests import set_digest

from headrace_trainer.checkpoints.state import Version as Version
from headrace_trainer.errors import Quiesced, Refusal, conflict
from headrace_trainer.learning.samples import Disposition, Group, GroupRecord, LearnItem


class Phase(Enum):
    """What the trainer's step attempt is in."""

    EMPTY = "empty"
    IDLE = "idle"
    ACCUMULATING = "accumulating"
    COMMITTED = "committed"


class Result(Enum):
    """How a commit ended."""

    COMMITTED = "committed"
    SET_MISMATCH = "set_mismatch"
    NONFINITE = "nonfinite"


@dataclass(frozen=True)
class Begin:
    """BeginStep."""

    step: int
    attempt: int
    base_number: int
    next_number: int


@dataclass(frozen=True)
class Commit:
    """CommitStep; `manifest_digest` stands for the opaque manifest."""

    step: int
    attempt: int
    base_number: int
    next_number: int
    set_digest: str
    manifest_digest: str
    optimizer: OptimizerSection | None = None
    """In place of the run's own."""


@dataclass(frozen=True)
class CommitReply:
    """What CommitStep answers, and answers again."""

    result: Result
    version: Version | None = None
    groups: int = 0
    sequences: int = 0
    tokens: int = 0
    max_staleness: int = 0
    tokens_by_version: Mapping[int, int] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    rated: Mapping[tuple[int, int], list[float]] = field(default_factory=dict)
    """By prompt ordinal and sample index: log-probs of the tokens under the new version."""


@dataclass(frozen=True)
class StepState:
    """Everything the reducer remembers. `lineage` maps live version numbers to ordinals.

    An attempt at `suspect_step` has failed for a gradient that was not finite; `suspects` are the groups whose own
    gradient is not finite, where that was found: digest → what is wrong.
    """

    phase: Phase = Phase.EMPTY
    version: Version | None = None
    lineage: Mapping[int, int] = field(default_factory=dict)
    highest_number: int = 0
    begun: Begin | None = None
    groups: Mapping[int, GroupRecord] = field(default_factory=dict)
    tainted: str = ""
    suspect_step: int = -1
    suspects: Mapping[str, str] = field(default_factory=dict)
    torn: Mapping[str, str] = field(default_factory=dict)
    """Groups that one of several policies refused after another may have learned from them: digest → why."""
    closed: tuple[int, int] = (-1, 0)
    last_commit: Commit | None = None
    last_reply: CommitReply | None = None

    @property
    def careful(self) -> bool:
        """The open attempt replays one whose gradient was not finite: each group's is looked at."""
        return self.begun is not None and self.begun.step == self.suspect_step

    @property
    def accumulated(self) -> list[GroupRecord]:
        """Groups whose gradient is in, by prompt."""
        kept = [r for r in self.groups.values() if r.disposition is Disposition.ACCUMULATED]
        return sorted(kept, key=lambda record: record.prompt_ordinal)


def held_version(state: StepState) -> Version:
    """The version held. Raises Refusal NOT_OPEN before Restore."""
    if state.version is None:
        raise Refusal("NOT_OPEN", "no version is held: call Restore first")
    return state.version


def restored(state: StepState, version: Version, lineage: Mapping[int, int]) -> StepState:
    """After Restore: nothing is open, whatever was."""
    return StepState(
        phase=Phase.IDLE,
        version=version,
        lineage={**lineage, version.number: version.ordinal},
        highest_number=max(state.highest_number, version.number),
        closed=(version.ordinal - 1, 0),
    )


def check_restore(state: StepState, number: int) -> None:
    """Raises Refusal when `number` was used before."""
    if number <= state.highest_number:
        raise Refusal(
            "INVALID",
            f"version number {number} is not above {state.highest_number}, which was used; numbers only rise",
            "invalid",
        )


def begin(state: StepState, command: Begin) -> tuple[StepState, bool]:
    """Opens an attempt; false for a retry of the open one, which changes nothing.

    A higher attempt at the open step replaces it: the coordinator has dropped the lower one.
    """
    version = held_version(state)
    key = (command.step, command.attempt)
    if state.begun is not None and (state.begun.step, state.begun.attempt) == key:
        if state.begun != command:
            raise conflict(f"step {key[0]} attempt {key[1]} was begun with another base or next number")
        if state.phase in (Phase.ACCUMULATING, Phase.COMMITTED):
            return state, False
    if state.phase is Phase.COMMITTED:
        raise Refusal(
            "NOT_RECORDED",
            f"version {version.number} is committed and not recorded: call RecordStep or Restore first",
        )
    if key <= state.closed or (state.phase is Phase.ACCUMULATING and _open(state) > key):
        raise Refusal("NOT_OPEN", f"step {key[0]} attempt {key[1]} is over; begin a later attempt or step")
    _check_base(version, command.base_number, command.step)
    if command.next_number <= version.number:
        raise Refusal(
            "INVALID",
            f"next_number {command.next_number} is not above the base's {version.number}",
            "invalid",
        )
    opened = replace(
        state,
        phase=Phase.ACCUMULATING,
        begun=command,
        groups={},
        tainted="",
        highest_number=max(state.highest_number, command.next_number),
    )
    return opened, True


def _open(state: StepState) -> tuple[int, int]:
    return (state.begun.step, state.begun.attempt) if state.begun else (-1, 0)


def _check_base(version: Version, base_number: int, step: int) -> None:
    if base_number != version.number:
        raise Refusal(
            "POLICY_MISMATCH", f"base {base_number} is not held; the trainer holds version {version.number}"
        )
    # A skipped step makes no version: steps may run ahead of ordinals, and never fall behind.
    if step < version.ordinal:
        raise Refusal(
            "INVALID", f"step {step} lies before ordinal {version.ordinal} of the base: it is done", "invalid"
        )


def check_open(state: StepState, step: int, attempt: int) -> Begin:
    """The open attempt. Raises Refusal NOT_OPEN when it is another or none."""
    if state.phase is not Phase.ACCUMULATING or state.begun is None or _open(state) != (step, attempt):
        raise Refusal("NOT_OPEN", f"step {step} attempt {attempt} is not open (phase {state.phase.value})")
    return state.begun


def known(state: StepState, group: Group) -> GroupRecord | None:
    """What was answered for this group before. Raises Refusal CONFLICT for other content."""
    record = state.groups.get(group.prompt_ordinal)
    if record is not None and record.digest != group.digest:
        raise conflict(
            f"prompt {group.prompt_ordinal} was learned in this attempt with other members or contents"
        )
    return record


def admit_each(state: StepState, items: Many[LearnItem]) -> tuple[dict[int, Group], list[Refusal | None]]:
    """The groups that are learned next, by prompt ordinal, and for each item why it is refused, or None.

    All of an item's groups are learned, or none: NOT_OPEN, CONFLICT, and the reasons of its lease.
    """
    groups: dict[int, Group] = {}
    refusals: list[Refusal | None] = []
    for item in items:
        try:
            item.authority()
            check_open(state, item.step, item.attempt)
            for group in item.groups:
                if groups.get(group.prompt_ordinal, group).digest != group.digest:
                    raise conflict(f"prompt {group.prompt_ordinal} came twice with other members or contents")
                known(state, group)
        except Refusal as refusal:
            refusals.append(refusal)
        else:
            groups.update((group.prompt_ordinal, group) for group in item.groups)
            refusals.append(None)
    return groups, refusals


def attempt_lost(state: StepState, quiesced: Quiesced) -> Refusal:
    """Why an attempt is over of which a part was accumulated before a lease lapsed."""
    step, attempt = _open(state)
    return Refusal(
        "ATTEMPT_LOST",
        f"{quiesced.message}; a part of these groups was accumulated before, so step {step} attempt "
        f"{attempt} is over: begin the next attempt",
    )


def learned(state: StepState, record: GroupRecord, *, taint: str = "") -> StepState:
    """Remembers what became of a group. `taint` says why the accumulators can no longer be trusted."""
    groups = {**state.groups, record.prompt_ordinal: record}
    return replace(state, groups=groups, tainted=state.tainted or taint)


def staleness(state: StepState, versions: set[int]) -> int:
    """Steps that the oldest of the versions lags behind the base. Raises Refusal STALE for foreign ones."""
    base = held_version(state)
    foreign = sorted(number for number in versions if number not in state.lineage)
    if foreign:
        raise Refusal("STALE", f"version {foreign[0]} is no live ancestor of base {base.number}")
    return max((base.ordinal - state.lineage[number] for number in versions), default=0)


def retried(state: StepState, command: Commit) -> CommitReply | None:
    """The reply of an earlier commit of the same key. Raises Refusal CONFLICT for other content."""
    last = state.last_commit
    if last is None or (last.step, last.attempt) != (command.step, command.attempt):
        return None
    if last != command:
        raise conflict(f"step {command.step} attempt {command.attempt} was committed with other content")
    return state.last_reply


def check_commit(state: StepState, command: Commit) -> Result | None:
    """Why the commit is refused by its answer; None where it may be applied. Raises Refusal where it does not fit."""
    begun = check_open(state, command.step, command.attempt)
    if (begun.base_number, begun.next_number) != (command.base_number, command.next_number):
        raise conflict(
            f"step {command.step} attempt {command.attempt} was begun on {begun.base_number} → "
            f"{begun.next_number}, not {command.base_number} → {command.next_number}"
        )
    if not state.accumulated:
        raise Refusal("EMPTY_STEP", "no group is accumulated: learn at least one group, or abort the attempt")
    if set_digest(key for record in state.accumulated for key in record.keys) != command.set_digest:
        return Result.SET_MISMATCH
    return Result.NONFINITE if state.tainted else None


def totals(state: StepState) -> CommitReply:
    """The trainer's own counts of the open attempt, as a committed reply without version and figures."""
    records = state.accumulated
    by_version: Counter[int] = Counter()
    for record in records:
        by_version.update(record.tokens_by_version)
    return CommitReply(
        result=Result.COMMITTED,
        groups=len(records),
        sequences=sum(record.sequences for record in records),
        tokens=sum(record.tokens for record in records),
        max_staleness=max((record.staleness for record in records), default=0),
        tokens_by_version=dict(by_version),
    )


def committed(state: StepState, command: Commit, reply: CommitReply) -> StepState:
    """After the optimizer: the new version is held and waits for RecordStep."""
    assert reply.version is not None
    return replace(
        state,
        phase=Phase.COMMITTED,
        version=reply.version,
        lineage={**state.lineage, reply.version.number: reply.version.ordinal},
        closed=(command.step, command.attempt),
        last_commit=command,
        last_reply=reply,
    )


def refused(
    state: StepState, command: Commit, reply: CommitReply, suspects: Mapping[str, str] | None = None
) -> StepState:
    """After a mismatch or a non-finite gradient: the attempt is over and the base is still held."""
    suspect = command.step if reply.result is Result.NONFINITE else state.suspect_step
    over = aborted(state, command.step, command.attempt)
    known = {**(state.suspects if suspect == state.suspect_step else {}), **(suspects or {})}
    return replace(over, suspect_step=suspect, suspects=known, last_commit=command, last_reply=reply)


def recorded(state: StepState, step: int, attempt: int, number: int) -> StepState:
    """After RecordStep; a retry changes nothing."""
    version = held_version(state)
    if state.closed != (step, attempt) or version.number != number:
        raise Refusal("NOT_OPEN", f"step {step} attempt {attempt} did not make version {number}")
    return replace(state, phase=Phase.IDLE, groups={}) if state.phase is Phase.COMMITTED else state


def aborted(state: StepState, step: int, attempt: int) -> StepState:
    """After AbortStep; an attempt that is over already, or never came, stays so."""
    if state.phase is Phase.COMMITTED and state.closed == (step, attempt):
        raise Refusal(
            "COMMITTED", f"step {step} attempt {attempt} is committed: record it, or restore a checkpoint"
        )
    if state.phase is not Phase.ACCUMULATING or _open(state) != (step, attempt):
        return (
            replace(state, closed=max(state.closed, (step, attempt))) if state.phase is Phase.IDLE else state
        )
    return replace(
        state, phase=Phase.IDLE, begun=None, groups={}, tainted="", closed=max(state.closed, (step, attempt))
    )


def lost(state: StepState) -> StepState:
    """After a failure that leaves weights or accumulators undefined: only Restore goes on."""
    return StepState(highest_number=state.highest_number)


def check_recorded(state: StepState, number: int) -> Version:
    """The held version when it is `number` and recorded. Raises Refusal otherwise."""
    version = held_version(state)
    if version.number != number:
        raise Refusal("POLICY_MISMATCH", f"version {number} is not held; the trainer holds {version.number}")
    if state.phase is Phase.COMMITTED:
        raise Refusal("NOT_RECORDED", f"version {number} is not recorded yet: call RecordStep first")
    return version


def refused_group(group: Group, disposition: Disposition, detail: str) -> GroupRecord:
    """The record of a group that is not learned from, and why."""
    return GroupRecord(group.prompt_ordinal, group.digest, tuple(group.keys()), disposition, detail)


def not_finite(record: GroupRecord, what: str = "loss") -> GroupRecord:
    """The record of a group whose loss or gradient is not finite."""
    detail = f"the {what} is not finite under the current weights"
    return GroupRecord(record.prompt_ordinal, record.digest, record.keys, Disposition.NONFINITE, detail)
