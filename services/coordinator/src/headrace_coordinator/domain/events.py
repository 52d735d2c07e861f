"""Everything that can happen, as facts. The log is a list of these; state is their fold.

Tuples instead of objects where an event carries many slots: the log stays small.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import msgspec

from headrace_coordinator.domain.ledger.compact import Drops, Run


class Event(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """A fact that has happened; `at` is seconds since the Unix epoch."""

    at: float


class RunEvent(Event, frozen=True, kw_only=True):
    """A fact about one run; shown on the run's event stream."""

    run: str


# --- the coordinator and its fleet


class CoordinatorStarted(Event, frozen=True, kw_only=True):
    """A coordinator took the store; counters leap so that nothing lost can be issued twice."""

    epoch: int
    store_id: str
    leap: int


class EpochRaised(Event, frozen=True, kw_only=True):
    """An instance or a checkpoint knew a higher coordinator epoch than the store did."""

    epoch: int


class InstanceRegistered(Event, frozen=True, kw_only=True):
    """A process announced itself."""

    instance: str
    incarnation: str
    kind: str
    host: str
    address: str
    devices: list[str]
    capabilities: dict[str, list[str]]


class InstanceDraining(Event, frozen=True, kw_only=True):
    """A process was told to stop; it gets no new work."""

    incarnation: str


class InstanceLost(Event, frozen=True, kw_only=True):
    """A process is gone, or unheard of for a lease's lifetime; `proven` when its exit was seen."""

    incarnation: str
    reason: str
    proven: bool


class LeaseGranted(Event, frozen=True, kw_only=True):
    """Devices were promised to an instance under a fresh epoch."""

    epoch: int
    incarnation: str
    run: str
    stage: str
    devices: list[str]
    host: str = ""


class LeaseHeld(Event, frozen=True, kw_only=True):
    """The holder has its memory."""

    epoch: int


class LeaseRevoking(Event, frozen=True, kw_only=True):
    """The holder was asked to release it; by when is known to the lease manager, on its own clock."""

    epoch: int


class LeaseEnded(Event, frozen=True, kw_only=True):
    """A lease is over; its devices are free when `proven`, else quarantined."""

    epoch: int
    cause: str
    proven: bool


class KeyUsed(Event, frozen=True, kw_only=True):
    """An HTTP write was accepted under an idempotency key."""

    key: str
    body: str
    resource: str


# --- runs


class RunSubmitted(RunEvent, frozen=True, kw_only=True):
    """A user submitted a run."""

    spec: dict[str, Any]
    directory: str
    evaluation: dict[str, Any] | None = None
    """What an evaluation of a suite asks; None for a run that trains."""


class RunIntentChanged(RunEvent, frozen=True, kw_only=True):
    """What is wanted of the run: RUN, PAUSE, PAUSE_NOW or CANCEL; `author` is `user` or `system`."""

    intent: str
    author: str
    reason: str


class RunStateChanged(RunEvent, frozen=True, kw_only=True):
    """The run's life moved on."""

    state: str
    reason: str


class RunArchived(Event, frozen=True, kw_only=True):
    """An ended run's history and summary are synced files: of the run itself, these few words stay in memory."""

    run: str
    state: str
    created_at: float
    evaluation: bool = False


class RunAdmitted(RunEvent, frozen=True, kw_only=True):
    """The run may use these instances (incarnations) and devices, and no others; replaces an earlier grant."""

    rollouts: list[str]
    trainers: list[str]
    devices: list[str]
    helpers: list[str] = []
    """Trainers beside the group, for what devices can do within a step."""


class RanksWanted(RunEvent, frozen=True, kw_only=True):
    """From the next step on the run's trainer group should have so many ranks."""

    ranks: int
    author: str
    reason: str


class TrainersChanged(RunAdmitted, frozen=True, kw_only=True):
    """Between two steps the trainer group got another size: with the grant that has its instances."""

    ranks: int
    step: int
    """The first step that it makes."""
    reason: str


class RunReleased(RunEvent, frozen=True, kw_only=True):
    """The run has nothing open and holds nothing."""


class GangFormed(RunEvent, frozen=True, kw_only=True):
    """Trainer instances, by rank, form a trainer group."""

    generation: int
    members: list[str]


class NumberBurnt(RunEvent, frozen=True, kw_only=True):
    """A version number was set aside for a restore; it is never given out again."""

    number: int


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What a rewind leaves of a run's figures, as its history has them before the first step that is made again."""

    counts: tuple[int, ...] = ()
    """Trained, dropped, duplicates, missing, worst staleness, filtered; a missing one is 0."""
    last_step: dict[str, Any] | None = None


class VersionRestored(RunEvent, frozen=True, kw_only=True):
    """The trainer holds a checkpoint's content, or the initial model, under a new number.

    Versions after the checkpoint are abandoned; slots from `frontier_step` on are pending again.
    """

    number: int
    parent: int
    ordinal: int
    digest: str
    checkpoint: str
    frontier_step: int
    frontier_prompt: int | None = None
    """Prompt ordinal that `frontier_step` begins with; none: no step before it took more groups than its own."""
    source_run: str = ""
    """The run that made the checkpoint, where it is another one: a fork."""
    warmup_steps: int = 0
    figures: dict[str, float] = {}
    kept: Kept | None = None


class PlanAdopted(RunEvent, frozen=True, kw_only=True):
    """From a step on (counted from 0) the run uses its devices like this; of a run that chooses itself."""

    from_step: int
    mode: str
    rollout: list[str] = []
    """Devices that generate; empty: as the mode divides them."""
    trainer: list[str] = []
    flow: str = ""
    memory: str = ""
    """As in the spec's placement; empty: what that says, or its default."""
    reason: str
    predicted_s: dict[str, float] = {}
    """Seconds of generate, learn and the whole step; empty while the mode is only measured."""
    alternatives: dict[str, float] = {}
    """Other placements and what a step would take with them, in seconds."""


class PlanProposed(PlanAdopted, frozen=True, kw_only=True):
    """What would be faster now, of a run whose plan only its user changes."""


class PolicyFitted(RunEvent, frozen=True, kw_only=True):
    """What a robot policy reads and does in the run's environment: settled once, as its first pools say."""

    policy: dict[str, Any] | None
    """The whole configuration of a new policy; None for one that is read from a directory."""
    state: list[str] | None
    cameras: dict[str, str] | None
    """Observations that are its state and its cameras' images."""


class StepOpened(RunEvent, frozen=True, kw_only=True):
    """An attempt at a step began; `number` is burnt for the version that it may make."""

    step: int
    attempt: int
    base: int
    number: int


class SlotsAssigned(RunEvent, frozen=True, kw_only=True):
    """Attempts were given out: (prompt ordinal, sample index, attempt, incarnation)."""

    slots: list[tuple[int, int, int, str]]


class SlotsFinished(RunEvent, frozen=True, kw_only=True):
    """Attempts ended: (prompt ordinal, sample index, attempt, digest, sampled tokens)."""

    slots: list[tuple[int, int, int, str, int]]


class SlotsReturned(RunEvent, frozen=True, kw_only=True):
    """Attempts ended without a usable trajectory; their slots wait again: (prompt ordinal, sample index, attempt)."""

    slots: list[tuple[int, int, int]]
    failed: bool = False
    """The producer made them and they ended with an error."""


class GroupsSettled(RunEvent, frozen=True, kw_only=True):
    """All members finished with final rewards: (prompt ordinal, [reward of each sample])."""

    groups: list[tuple[int, list[float]]]


class GroupsAccumulated(RunEvent, frozen=True, kw_only=True):
    """The trainer group has the groups' gradients: prompt ordinals. A helper's came with its contribution."""

    step: int
    attempt: int
    prompts: list[int]
    helper: str = ""
    """Name of the helper whose contribution they came with."""


class GroupDropped(RunEvent, frozen=True, kw_only=True):
    """A group will not be trained."""

    step: int
    prompt: int
    reason: str
    detail: str
    reward: float = 0.0
    """Every member's, where the group is FILTERED."""


Observed = tuple[int, int, int]
"""Place of a data item among those that are trained, answers to it that passed, answers."""


class StepRefilled(RunEvent, frozen=True, kw_only=True):
    """The open step takes so many of the next groups, in place of those that were dropped before they settled."""

    step: int
    groups: int


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Attests one update, from the coordinator's and the trainer's own counts. `compact` says what its lists hold."""

    number: int
    parent: int
    ordinal: int
    digest: str
    step: int
    attempt: int
    trained: list[Run]
    dropped: Drops
    set_digest: str
    tokens: int
    tokens_by_version: dict[int, int]
    max_staleness: int
    log_prob_mismatch_mean: float | None
    drop_rate_by_length: dict[str, float]
    drop_rate_by_pass_rate: dict[str, float]
    log_prob_compared_tokens: int = 0
    log_prob_mismatch_kl: float | None = None
    refilled: int = 0
    """Groups that the step took in place of dropped ones."""
    helped: dict[str, list[int]] = {}
    """Name of a helper → prompt ordinals of the groups whose gradient it contributed."""
    scored_by_stage: dict[str, int] = {}
    """Trained answers that each of several reward stages scored; empty for a workflow with one."""
    reward_by_stage: dict[str, float] = {}
    """The mean reward that they got there."""


class StepCommitted(RunEvent, frozen=True, kw_only=True):
    """A version exists, its slots are trained or dropped, and here is the certificate: one fact."""

    certificate: Certificate
    view: dict[str, Any]
    observed: list[Observed] = []
    """By group, for a run with a curriculum."""


class StepSkipped(RunEvent, frozen=True, kw_only=True):
    """A step ended without a version: every slot of it is dropped."""

    step: int
    dropped: Drops
    refilled: int = 0
    observed: list[Observed] = []


class StepAborted(RunEvent, frozen=True, kw_only=True):
    """An attempt at a step ended without a version; its finished slots may be used again."""

    step: int
    attempt: int
    reason: str


class Evaluated(RunEvent, frozen=True, kw_only=True):
    """Held-out items were evaluated."""

    view: dict[str, Any]


class EvaluationProgressed(RunEvent, frozen=True, kw_only=True):
    """So many answers of an evaluation of a suite are scored and written; `digest` is that of the weights."""

    answers: int
    digest: str


class SuiteEvaluated(RunEvent, frozen=True, kw_only=True):
    """What an evaluation of a suite found."""

    result: dict[str, Any]


class CheckpointSaved(RunEvent, frozen=True, kw_only=True):
    """A checkpoint is durable; steps below `step` are in it."""

    name: str
    number: int
    step: int = 0


class CheckpointFailed(RunEvent, frozen=True, kw_only=True):
    """A checkpoint could not be written; training goes on, a rewind would lose more."""

    reason: str


class CheckpointSetAside(RunEvent, frozen=True, kw_only=True):
    """A checkpoint is damaged and was renamed; the one before it is used."""

    name: str
    reason: str


class DatasetOpened(RunEvent, frozen=True, kw_only=True):
    """The items that the run's slots stand for, by digest."""

    digest: str


class ModelExported(RunEvent, frozen=True, kw_only=True):
    """The weights were written as a Hugging Face directory."""

    path: str
    number: int


class RunRecovering(RunEvent, frozen=True, kw_only=True):
    """Something failed; the run goes on from what is left."""

    reason: str


class Noted(RunEvent, frozen=True, kw_only=True):
    """Something worth telling the run's user."""

    text: str


AnyEvent = (
    CoordinatorStarted
    | EpochRaised
    | InstanceRegistered
    | InstanceDraining
    | InstanceLost
    | LeaseGranted
    | LeaseHeld
    | LeaseRevoking
    | LeaseEnded
    | KeyUsed
    | RunSubmitted
    | RunIntentChanged
    | RunStateChanged
    | RunArchived
    | RunAdmitted
    | RanksWanted
    | TrainersChanged
    | RunReleased
    | GangFormed
    | NumberBurnt
    | VersionRestored
    | PlanAdopted
    | PlanProposed
    | PolicyFitted
    | StepOpened
    | SlotsAssigned
    | SlotsFinished
    | SlotsReturned
    | GroupsSettled
    | GroupsAccumulated
    | GroupDropped
    | StepRefilled
    | StepCommitted
    | StepSkipped
    | StepAborted
    | Evaluated
    | EvaluationProgressed
    | SuiteEvaluated
    | CheckpointSaved
    | CheckpointFailed
    | CheckpointSetAside
    | DatasetOpened
    | ModelExported
    | RunRecovering
    | Noted
)
"""All events; the union that the log decodes to."""

_encoder = msgspec.json.Encoder()
_decoder: Any = msgspec.json.Decoder(AnyEvent)

LEDGER_EVENTS = (
    SlotsAssigned,
    SlotsFinished,
    SlotsReturned,
    GroupsSettled,
    GroupsAccumulated,
    StepRefilled,
    NumberBurnt,
)
"""Run events that only the log needs: too many and too small to show."""


def is_public(event: Event) -> TypeGuard[RunEvent]:
    """The event belongs to its run's history, which people read."""
    return isinstance(event, RunEvent) and not isinstance(event, LEDGER_EVENTS)


def encode(event: Event) -> bytes:
    """One event as JSON."""
    return _encoder.encode(event)


def decode(data: bytes) -> AnyEvent:
    """One event from JSON; raises msgspec.ValidationError on anything else."""
    event: AnyEvent = _decoder.decode(data)
    return event
