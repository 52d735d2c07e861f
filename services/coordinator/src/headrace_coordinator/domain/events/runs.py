"""Events of a run's life: what is wanted of it, what it holds, its versions, evaluations and checkpoints."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_coordinator.domain.events.base import Event, RunEvent


class RunSubmitted(RunEvent, frozen=True, kw_only=True):
    """A user submitted a run."""

    spec: dict[str, Any]
    directory: str
    evaluation: dict[str, Any] | None = None
    """The request of an evaluation of a suite; None for a run that trains."""
    follows: list[str] = []
    """The runs before it, each of which begins with the export of the one before; it begins with that of the last."""
    owner: str = "admin"
    team: str = ""
    visibility: str = "private"


class RunFollowed(RunEvent, frozen=True, kw_only=True):
    """The run that this one begins after has succeeded: it begins with that one's export."""

    origin: str
    path: str


class RunIntentChanged(RunEvent, frozen=True, kw_only=True):
    """What is wanted of the run: RUN, PAUSE, PAUSE_NOW or CANCEL; `author` is `user` or `system`."""

    intent: str
    author: str
    reason: str


class RunStateChanged(RunEvent, frozen=True, kw_only=True):
    """The run has entered another state."""

    state: str
    reason: str


class RunArchived(Event, frozen=True, kw_only=True):
    """An ended run's history and summary are synced files: only these fields of it stay in memory."""

    run: str
    state: str
    created_at: float
    evaluation: bool = False
    owner: str = "admin"
    team: str = ""
    visibility: str = "private"


class RunDeleted(Event, frozen=True, kw_only=True):
    """A user deleted an ended run: it is not listed any more, and its directory is removed."""

    run: str


class RunAdmitted(RunEvent, frozen=True, kw_only=True):
    """The run may use these instances (incarnations) and devices, and no others; replaces an earlier grant."""

    rollouts: list[str]
    trainers: list[str]
    devices: list[str]
    helpers: list[str] = []
    """Trainers beside the group and rollouts without devices, which work on others' devices within a step."""


class RanksWanted(RunEvent, frozen=True, kw_only=True):
    """The number of ranks that the run's trainer group should have from the next step on."""

    ranks: int
    author: str
    reason: str


class TrainersChanged(RunAdmitted, frozen=True, kw_only=True):
    """Between two steps the trainer group got another size; with the grant of its instances."""

    ranks: int
    step: int
    """The first step that it makes."""
    reason: str
    given_to: str = ""
    """Id of the waiting run that the trainers were released for."""


class RunReleased(RunEvent, frozen=True, kw_only=True):
    """The run is open at no instance and holds nothing."""


class TrainerGroupFormed(RunEvent, frozen=True, kw_only=True):
    """Trainer instances, by rank, form a trainer group."""

    generation: int
    trainers: list[str]


class LayoutChosen(RunEvent, frozen=True, kw_only=True):
    """A trainer group that took up what the one before has carried holds the model so; see `VersionRestored.layout`."""

    layout: str


class NumberBurnt(RunEvent, frozen=True, kw_only=True):
    """A version number was used for a restore; it is never used again."""

    number: int


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A run's figures after a rewind: as of the first step that is made again."""

    counts: tuple[int, ...] = ()
    """Trained, dropped, duplicates, missing, worst staleness, filtered; a missing one is 0."""
    last_step: dict[str, Any] | None = None


class VersionRestored(RunEvent, frozen=True, kw_only=True):
    """The trainer has restored a checkpoint, or the initial model, under a new number.

    Versions after the checkpoint are abandoned; slots from `frontier_step` on are pending again.
    """

    number: int
    parent: int
    ordinal: int
    digest: str
    checkpoint: str
    frontier_step: int
    frontier_prompt: int | None = None
    """Prompt ordinal that `frontier_step` begins with; None: no step before it was refilled."""
    source_run: str = ""
    """The run that made the checkpoint, where it is another one: a fork."""
    warmup_steps: int = 0
    figures: dict[str, float] = {}
    layout: str = ""
    """How the trainers hold the model, and why; as the leader of the trainer group says it."""
    kept: Kept | None = None
    recovery: bool = False
    """Something had failed, or steps are made again. Not where a run that had yielded or was paused goes on."""


class PlanAdopted(RunEvent, frozen=True, kw_only=True):
    """From a step on (counted from 0) the run uses its devices like this; of a run that chooses itself."""

    from_step: int
    mode: str
    rollout: list[str] = []
    """Devices that generate; empty: as the mode divides them."""
    trainer: list[str] = []
    flow: str = ""
    memory: str = ""
    """A value of `placement.memory`; empty: what the spec says, or its default."""
    reason: str
    predicted_s: dict[str, float] = {}
    """Seconds of generate, learn and the whole step; empty while the mode is only measured."""
    alternatives: dict[str, float] = {}
    """Other placements and what a step would take with them, in seconds."""


class PlanProposed(PlanAdopted, frozen=True, kw_only=True):
    """A plan that would be faster now, of a run whose plan only its user changes."""


class PolicyFitted(RunEvent, frozen=True, kw_only=True):
    """What a robot policy reads and does in the run's environment: fixed once, when its first pools are open."""

    policy: dict[str, Any] | None
    """The whole configuration of a new policy; None for one that is read from a directory."""
    state: list[str] | None
    cameras: dict[str, str] | None
    """Observations that are its state and its cameras' images."""
    versions: dict[str, str] = {}
    """Of what its environments are made of, by name."""


class Evaluated(RunEvent, frozen=True, kw_only=True):
    """Held-out items were evaluated."""

    view: dict[str, Any]


class EvaluationProgressed(RunEvent, frozen=True, kw_only=True):
    """How many answers of an evaluation of a suite are scored and written; `digest` is that of the weights."""

    answers: int
    digest: str
    versions: dict[str, str] = {}
    """Of the simulators that answered, by package."""


class SuiteEvaluated(RunEvent, frozen=True, kw_only=True):
    """The result of an evaluation of a suite."""

    result: dict[str, Any]


class CheckpointSaved(RunEvent, frozen=True, kw_only=True):
    """A checkpoint is durable; steps below `step` are in it."""

    name: str
    number: int
    step: int = 0


class CheckpointFailed(RunEvent, frozen=True, kw_only=True):
    """A checkpoint could not be written; training goes on, and a rewind would lose more steps."""

    reason: str


class CheckpointSetAside(RunEvent, frozen=True, kw_only=True):
    """A checkpoint is damaged and was renamed; the one before it is used."""

    name: str
    reason: str


class CheckpointUploaded(RunEvent, frozen=True, kw_only=True):
    """A checkpoint is whole in the run's store: all of it was read back."""

    name: str
    number: int
    step: int
    url: str
    seconds: float
    size: int


class UploadSkipped(RunEvent, frozen=True, kw_only=True):
    """A checkpoint is not uploaded, as newer ones wait already: uploads are slower than checkpoints."""

    name: str
    step: int
    reason: str


class UploadFailed(RunEvent, frozen=True, kw_only=True):
    """The store refuses what the run keeps; training goes on, and it is tried again."""

    reason: str


class DatasetOpened(RunEvent, frozen=True, kw_only=True):
    """The items that the run's slots stand for, by digest."""

    digest: str


class ModelExported(RunEvent, frozen=True, kw_only=True):
    """The weights were written as a Hugging Face directory."""

    path: str
    number: int


class RunRecovering(RunEvent, frozen=True, kw_only=True):
    """Something failed; the run recovers."""

    reason: str


class Noted(RunEvent, frozen=True, kw_only=True):
    """A message for the run's user."""

    text: str
    plain: bool = False
    """Whether it says what was decided, or that all is as it should be; other messages are shown as trouble."""


class StageEnded(RunEvent, frozen=True, kw_only=True):
    """A stage beside the steps that took long has come to its end, such as loading the model."""

    what: str
    seconds: float


class DeathCharged(Noted, frozen=True, kw_only=True):
    """A shared instance died while code of this run alone was at work in it."""

    kind: str
    count: int
    """Deaths of instances of this kind without progress between them."""
    progress: int
    """`RunState.progress` at the death."""


class ScorerFailed(Noted, frozen=True, kw_only=True):
    """A scorer failed at an answer for the first time, with these words."""

    detail: str


class Warned(RunEvent, frozen=True, kw_only=True):
    """What makes the run learn nothing has changed: all warnings that hold now, by what they are about."""

    warnings: dict[str, str]
