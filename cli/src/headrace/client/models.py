"""The coordinator's resources as read-only dataclasses.

Lenient: fields that a newer coordinator adds are kept in `raw` and otherwise ignored, fields that an older
one lacks have their default.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

ENDED_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})

ResourceT = TypeVar("ResourceT", bound="Resource")


@dataclass(frozen=True, kw_only=True)
class Resource:
    """Something the coordinator shows; `raw` is its JSON as it came."""

    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_json(cls: type[ResourceT], data: Mapping[str, Any]) -> ResourceT:
        """Builds the resource from JSON, nested resources included.

        >>> Policy.from_json({"number": 3, "ordinal": 2, "new_field": 1}).number
        3
        """
        kinds = _field_types(typing.cast(Any, cls))
        known = {name: _convert(kind, data[name]) for name, kind in kinds.items() if name in data}
        return cls(raw=dict(data), **{name: value for name, value in known.items() if value is not _DEFAULT})


_DEFAULT = object()


@cache
def _field_types(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in fields(cls) if item.name != "raw"}


def _convert(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in arguments if a is not types.NoneType)
        return None if value is None else _convert(inner, value)
    if value is None:  # JSON has no NaN: the coordinator sends null
        return math.nan if kind is float else _DEFAULT
    if origin is list and is_dataclass(arguments[0]):
        return [_convert(arguments[0], item) for item in value]
    if isinstance(kind, type) and issubclass(kind, Resource):
        return kind.from_json(value)
    return value


@dataclass(frozen=True, kw_only=True)
class Policy(Resource):
    """A policy version: `ordinal` counts the steps of the live lineage, `number` only rises."""

    number: int = 0
    parent: int = 0
    ordinal: int = 0
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Resource):
    """One evaluation of held-out items; `parts` are the scorers' means before weighting."""

    kind: str = "heldout"
    step: int = 0
    version: int = 0
    score: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    answers: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Step(Resource):
    """One committed step. Seconds by stage: generate, score, learn, sync, switch, protocol."""

    step: int = 0
    version: int = 0
    wall_s: float = 0.0
    reward_mean: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    devices: dict[str, dict[str, float]] = field(default_factory=dict)
    trained: int = 0
    dropped: int = 0
    max_staleness: int = 0
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Counts(Resource):
    """Slots of the live lineage, recomputed by the coordinator from certificates and the slot ledger."""

    trained: int = 0
    dropped: int = 0
    duplicates: int = 0
    max_staleness: int = 0
    frontier: int = 0


@dataclass(frozen=True, kw_only=True)
class Run(Resource):
    """One run."""

    name: str = ""
    id: str = ""
    state: str = ""
    reason: str = ""
    step: int = 0
    steps: int = 0
    created_at: float = 0.0
    started_at: float | None = None
    finished_at: float | None = None
    waiting_for: list[str] = field(default_factory=list)
    policy: Policy | None = None
    warmup_steps: int = 0
    baseline_prefill: Evaluation | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    last_step: Step | None = None
    counts: Counts = field(default_factory=Counts)
    recoveries: int = 0
    run_directory: str = ""
    export_path: str = ""
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """Whether it is SUCCEEDED, FAILED or CANCELLED."""
        return self.state in ENDED_STATES


@dataclass(frozen=True, kw_only=True)
class Event(Resource):
    """One event of a run."""

    id: int = 0
    type: str = ""
    time: float = 0.0
    run: str = ""
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Certificate(Resource):
    """Attests one update.

    `trained` holds (prompt ordinal, sample index, attempt), `dropped` (prompt ordinal, sample index, reason).
    """

    version: Policy = field(default_factory=Policy)
    step: int = 0
    attempt: int = 0
    live: bool = True
    trained: list[list[int]] = field(default_factory=list)
    dropped: list[list[Any]] = field(default_factory=list)
    set_digest: str = ""
    tokens: int = 0
    tokens_by_version: dict[str, int] = field(default_factory=dict)
    max_staleness: int = 0
    log_prob_mismatch_mean: float | None = None
    log_prob_compared_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Trajectory(Resource):
    """One settled trajectory as text."""

    step: int = 0
    version: int = 0
    prompt_ordinal: int = 0
    sample_index: int = 0
    attempt: int = 0
    prompt: str = ""
    completion: str = ""
    reference: str = ""
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str = ""
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Resource):
    """One durable checkpoint."""

    name: str = ""
    version: Policy = field(default_factory=Policy)
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Instance(Resource):
    """One running process of a service; `state` is READY, SILENT, LOST or DRAINING."""

    name: str = ""
    incarnation: str = ""
    kind: str = ""
    state: str = ""
    host: str = ""
    address: str = ""
    devices: list[str] = field(default_factory=list)
    run: str = ""
    resident_memory_bytes: int = 0
    last_heartbeat_age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Lease(Resource):
    """One lease; `state` is GRANTED, HELD or REVOKING."""

    epoch: int = 0
    state: str = ""
    instance: str = ""
    run: str = ""
    stage: str = ""
    devices: list[str] = field(default_factory=list)
    expires_in_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Device(Resource):
    """One device; `state` is FREE, LEASED or QUARANTINED."""

    name: str = ""
    state: str = ""
    holder: str = ""
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Leases(Resource):
    """All leases and devices of the fleet."""

    leases: list[Lease] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
