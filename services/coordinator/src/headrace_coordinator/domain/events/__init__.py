"""Everything that can happen, as facts. The log is a list of these; state is their fold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard, Union

import msgspec

from headrace_coordinator.domain.events.base import *  # noqa: F403
from headrace_coordinator.domain.events.base import Event, RunEvent
from headrace_coordinator.domain.events.fleet import *  # noqa: F403
from headrace_coordinator.domain.events.runs import *  # noqa: F403
from headrace_coordinator.domain.events.runs import NumberBurnt
from headrace_coordinator.domain.events.steps import *  # noqa: F403
from headrace_coordinator.domain.events.steps import (
    GroupsAccumulated,
    GroupsSettled,
    SlotsAssigned,
    SlotsFinished,
    SlotsOpened,
    SlotsReturned,
    StepRefilled,
)


def _kinds(of: type[Event]) -> Iterator[type[Event]]:
    """All events of a kind that can happen: `Event` and `RunEvent` say only what they have in common."""
    for kind in of.__subclasses__():
        if kind is not RunEvent:
            yield kind
        yield from _kinds(kind)


_encoder = msgspec.json.Encoder()
_decoder: Any = msgspec.json.Decoder(Union[tuple(_kinds(Event))])  # noqa: UP007

LEDGER_EVENTS = (
    SlotsAssigned,
    SlotsFinished,
    SlotsOpened,
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


def decode(data: bytes) -> Event:
    """One event from JSON; raises msgspec.DecodeError on anything else."""
    try:
        event: Event = _decoder.decode(data)
    except UnicodeDecodeError as error:  # Which msgspec lets through for text that is not UTF-8.
        raise msgspec.DecodeError(f"not UTF-8 at byte {error.start}") from error
    return event
