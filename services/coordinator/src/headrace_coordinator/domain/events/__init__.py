"""Everything that can happen, as facts. The log is a list of these; state is their fold."""

from __future__ import annotations

from typing import Any, TypeGuard

import msgspec

from headrace_coordinator.domain.events.base import Event, RunEvent
from headrace_coordinator.domain.events.fleet import (
    CoordinatorStarted,
    EpochRaised,
    FleetEvent,
    InstanceDraining,
    InstanceLost,
    InstanceRegistered,
    KeyUsed,
    LeaseEnded,
    LeaseGranted,
    LeaseHeld,
    LeaseRevoking,
)
from headrace_coordinator.domain.events.runs import (
    CheckpointFailed,
    CheckpointSaved,
    CheckpointSetAside,
    DatasetOpened,
    Evaluated,
    EvaluationProgressed,
    Kept,
    LifeEvent,
    ModelExported,
    Noted,
    NumberBurnt,
    PlanAdopted,
    PlanProposed,
    PolicyFitted,
    RanksWanted,
    RunAdmitted,
    RunArchived,
    RunIntentChanged,
    RunRecovering,
    RunReleased,
    RunStateChanged,
    RunSubmitted,
    SuiteEvaluated,
    TrainerGroupFormed,
    TrainersChanged,
    VersionRestored,
)
from headrace_coordinator.domain.events.steps import (
    Certificate,
    GroupDropped,
    GroupsAccumulated,
    GroupsSettled,
    Observed,
    SlotsAssigned,
    SlotsFinished,
    SlotsReturned,
    StepAborted,
    StepCommitted,
    StepEvent,
    StepOpened,
    StepRefilled,
    StepSkipped,
)

__all__ = [
    "LEDGER_EVENTS",
    "AnyEvent",
    "Certificate",
    "CheckpointFailed",
    "CheckpointSaved",
    "CheckpointSetAside",
    "CoordinatorStarted",
    "DatasetOpened",
    "EpochRaised",
    "Evaluated",
    "EvaluationProgressed",
    "Event",
    "GroupDropped",
    "GroupsAccumulated",
    "GroupsSettled",
    "InstanceDraining",
    "InstanceLost",
    "InstanceRegistered",
    "Kept",
    "KeyUsed",
    "LeaseEnded",
    "LeaseGranted",
    "LeaseHeld",
    "LeaseRevoking",
    "ModelExported",
    "Noted",
    "NumberBurnt",
    "Observed",
    "PlanAdopted",
    "PlanProposed",
    "PolicyFitted",
    "RanksWanted",
    "RunAdmitted",
    "RunArchived",
    "RunEvent",
    "RunIntentChanged",
    "RunRecovering",
    "RunReleased",
    "RunStateChanged",
    "RunSubmitted",
    "SlotsAssigned",
    "SlotsFinished",
    "SlotsReturned",
    "StepAborted",
    "StepCommitted",
    "StepOpened",
    "StepRefilled",
    "StepSkipped",
    "SuiteEvaluated",
    "TrainerGroupFormed",
    "TrainersChanged",
    "VersionRestored",
    "decode",
    "encode",
    "is_public",
]

AnyEvent = FleetEvent | LifeEvent | StepEvent
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
