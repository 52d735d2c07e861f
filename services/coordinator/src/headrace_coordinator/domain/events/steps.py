"""Events of a run's steps: slots, groups, and the certificate of what was committed.

Tuples instead of objects where an event carries many slots: the log stays small.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace_coordinator.domain.events.base import RunEvent
from headrace_coordinator.domain.ledger.compact import Drops, Run


class StepOpened(RunEvent, frozen=True, kw_only=True):
    """An attempt at a step began; the version that it may make has `number`, which is never used again."""

    step: int
    attempt: int
    base: int
    number: int
    goes_on: bool = False
    """Whether slots stay as they are, since answers to them are being made; else none is assigned or settled."""


class SlotsOpened(RunEvent, frozen=True, kw_only=True):
    """The slots of a step may start ahead of the step that is learned; steps are opened in order."""

    step: int


class SlotsAssigned(RunEvent, frozen=True, kw_only=True):
    """Samples were assigned to rollouts: (prompt ordinal, sample index, attempt, incarnation)."""

    slots: list[tuple[int, int, int, str]]


class SlotsFinished(RunEvent, frozen=True, kw_only=True):
    """Attempts ended: (prompt ordinal, sample index, attempt, digest, sampled tokens)."""

    slots: list[tuple[int, int, int, str, int]]


class SlotsReturned(RunEvent, frozen=True, kw_only=True):
    """Attempts ended without a usable trajectory and are made again: (prompt ordinal, sample index, attempt)."""

    slots: list[tuple[int, int, int]]
    failed: bool = False
    """Whether they ended with an error of the sample."""


class GroupsSettled(RunEvent, frozen=True, kw_only=True):
    """All samples of groups have final rewards: (prompt ordinal, [reward of each sample])."""

    groups: list[tuple[int, list[float]]]


class GroupsAccumulated(RunEvent, frozen=True, kw_only=True):
    """The trainer group has accumulated the gradients of groups: prompt ordinals."""

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
    """The reward of every sample, if the group is FILTERED."""


Observed = tuple[int, int, int]
"""Place of a data item among those that are trained, answers to it that passed, answers."""


class StepRefilled(RunEvent, frozen=True, kw_only=True):
    """An open step takes some of the next groups, in place of those that were dropped before they settled.

    They were the first ones of the step behind it, which takes the same number from the next; the last step's are new.
    """

    step: int
    groups: int


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """Attests one update, from the coordinator's and the trainer's own counts. Its lists are those of `compact`."""

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
    mean_staleness: float = 0.0
    """Over the tokens."""
    log_prob_compared_tokens: int = 0
    log_prob_mismatch_kl: float | None = None
    log_prob_mismatch_bits: int | None = None
    """Of a deterministic run, over the compared tokens: 0, as the run ends with the first bit."""
    refilled: int = 0
    """Groups that the step took in place of dropped ones."""
    helped: dict[str, list[int]] = {}
    """Name of a helper → prompt ordinals of the groups whose gradient it contributed."""
    scored_by_stage: dict[str, int] = {}
    """Trained answers that each of several reward stages scored; empty for a workflow with one."""
    reward_by_stage: dict[str, float] = {}
    """The mean reward that they got there."""


class StepCommitted(RunEvent, frozen=True, kw_only=True):
    """A version exists, and its slots are trained or dropped, as the certificate says: one fact."""

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
